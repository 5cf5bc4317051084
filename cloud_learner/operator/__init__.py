"""The operator page."""
