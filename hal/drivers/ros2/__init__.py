"""Robots behind ROS 2 topics and services, reached as `ros2` through `hal.registry`.

Only `wrapper` imports rclpy.
"""
