"""Robots, cameras and teleoperators as schedulable resources; `registry` finds a driver by its name.

Imports `wire` alone. What runs on robots uses it; of the cloud, only `resource` and `scheduler` are for it.
"""
