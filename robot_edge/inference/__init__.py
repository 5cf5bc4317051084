"""The inference process and the latent server: observations in, chunks out.

The slow path encodes, the fast path samples actions; weights are swapped between two requests.
"""
