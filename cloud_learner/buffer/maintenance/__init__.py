"""Keeping the store whole and in bounds: sealing, checking, forgetting, rewriting."""
