"""The Gaussian policy: small, one pass of a network for each chunk. Only `policy` and `network` need torch."""
