"""Keeping the store whole and in bounds: sealing, checking, forgetting, rewriting.

For the gateway's process and `vla-fleet buffer`; all of it works beside a running fleet.
"""
