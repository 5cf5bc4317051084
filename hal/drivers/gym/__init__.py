"""Gymnasium environments as robots, reached as `gym` through `hal.registry`."""
