"""What turns an observation into an action chunk, and how it learns: one folder for each kind of policy.

Imports `wire` alone. Robots and the cloud know a policy by `policies.interface`; recipes name a kind.
"""
