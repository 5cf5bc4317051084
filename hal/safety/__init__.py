"""Limits outside every policy: bounds of actions, of how fast they change, of the workspace.

For whoever commands a robot: control, the driver's process, drivers.
"""
