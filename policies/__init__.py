"""What turns an observation into an action chunk, and how it learns: one folder for each kind of policy.

Imports `wire` alone. Others come in through `policies.interface`.
"""
