"""Which algorithm learns how fast, from how much help."""
