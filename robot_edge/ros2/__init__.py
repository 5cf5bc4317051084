"""The edge as a ROS 2 node: parameters, lifecycle, topics, diagnostics.

Only `fleet.ros2` may come in.
"""
