"""Gymnasium environments as robots, reached as `gymnasium` and `gym-*` through `hal.registry`."""
