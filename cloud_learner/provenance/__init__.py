"""Whose steps are whose: what a robot says of them is held against the fleet's own record, and against its spec.

For the gateway, which asks before it stores.
"""
