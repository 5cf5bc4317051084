"""The flow-matching policy. Only `policy` and `networks` need torch."""
