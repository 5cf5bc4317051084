"""Robots that `hal.registry` knows by name. Nothing here is imported until its robot is asked for."""
