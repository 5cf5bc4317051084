"""The policy contract as checks that run on any policy: `check.check_policy`."""
