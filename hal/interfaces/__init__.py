"""The protocols that a device keeps: robot, camera, teleoperator; and the model of how a robot moves.

For everybody on the robot's side; imports `wire` alone.
"""
