"""A learner and where its sampling is, on disk: written beside the gradient steps, read back at any world size."""
