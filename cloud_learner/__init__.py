"""What runs in the cloud: gateway, buffer, dispatch, operator page, trainer.

It knows a robot by the `RobotSpec` that came over the wire; it imports no driver and nothing of `robot_edge`.
"""
