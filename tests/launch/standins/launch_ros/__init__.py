"""Stands in for ROS 2's `launch_ros`; see `launch` beside it."""
