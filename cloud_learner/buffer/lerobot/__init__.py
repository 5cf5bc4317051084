"""LeRobot datasets, out of the buffer and into it."""
