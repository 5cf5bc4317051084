"""Robots, cameras and teleoperators as schedulable resources."""
