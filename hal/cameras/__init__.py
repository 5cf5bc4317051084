"""Cameras that `hal.registry` knows by name. Nothing here is imported until its camera is asked for."""
