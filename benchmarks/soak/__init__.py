"""Whatever fails for however long: nothing acknowledged is lost or stored twice, and soon all is as it was."""
