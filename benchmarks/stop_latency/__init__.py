"""How long a stop takes from the person to the driver; nobody else comes in."""
