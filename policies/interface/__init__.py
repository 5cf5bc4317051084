"""What a policy must offer, and how one is found by name. Everybody may import this.

Light: `registry` and `options` load no torch.
"""
