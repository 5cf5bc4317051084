"""Devices that a person teleoperates with (`hal.device.Device`)."""
