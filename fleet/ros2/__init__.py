"""Entry points of the ROS 2 package: `edge_node` and `sim_robot_node`.

Nobody imports it.
"""
