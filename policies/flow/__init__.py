"""The flow-matching policy. Only `policy`, `network_policy`, `batches`, `residual` and `networks` need torch."""
