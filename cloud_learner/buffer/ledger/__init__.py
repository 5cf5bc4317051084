"""What exists and where it lies: one SQL database."""
