"""The policy contract as checks that run on any policy: `check.check_policy`.

For authors of policies and for `vla-fleet policy check`.
"""
