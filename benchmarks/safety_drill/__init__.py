"""A seeded drill of everything between a decision and a motor: see `__main__`."""
