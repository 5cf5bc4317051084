"""LeRobot robots and teleoperators, reached as `lerobot` through `hal.registry`."""
