"""Training on several ranks: one process each, which share weights, averages and moments, and average gradients."""
