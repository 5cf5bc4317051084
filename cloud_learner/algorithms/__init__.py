"""One file per algorithm: a config and a loss."""
