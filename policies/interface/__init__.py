"""What a policy must offer, how one is found by name, and what of it learns and travels.

For everybody. Light: only `trainable` needs torch.
"""
