"""What a training run shows to people: figures for Prometheus, and its curves."""
