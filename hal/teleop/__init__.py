"""Devices that a person teleoperates with (`hal.interfaces.teleop.TeleopDevice`)."""
