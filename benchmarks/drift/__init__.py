"""What becomes of a trained fleet when the world changes under it."""
