"""Devices that a person drives a robot with, one module each (`hal.interfaces.teleop.TeleopDevice`).

For `vla-fleet teleop`.
"""
