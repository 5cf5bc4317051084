"""Networks of the flow policy: slow paths (images, words), fast paths (actions), sampling.

Only `policies.flow` may come in.
"""
