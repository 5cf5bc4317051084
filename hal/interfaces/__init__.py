"""Protocols a device keeps: robot, camera, teleoperator; and the model of how a robot moves.

Everybody may import this; it imports only `wire`.
"""
