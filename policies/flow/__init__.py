"""The flow-matching policy. Only `policy`, `network_policy` and `networks` need torch."""
