"""Networks of the flow policy: slow paths (images, words), fast paths (actions), sampling.

For `policies.flow`, and `policies.tokens`, which shares the slow path.
"""
