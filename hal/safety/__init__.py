"""Limits outside every policy: bounds of actions, of how fast they change, of the workspace."""
