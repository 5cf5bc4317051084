"""Limits outside every policy: bounds of actions, of how fast they change, of the workspace.

For whoever commands a robot, or reckons what it will do: control, chunking, the driver's process, drivers.
"""
