"""The inference process and the latent server: observations in, chunks out.

The slow path encodes, the fast path makes actions; weights are swapped between two requests.
"""
