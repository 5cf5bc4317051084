"""What it costs to bring better weights to robots."""
