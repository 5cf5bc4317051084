"""What runs on the robot's computer: control, inference, uplink, and what starts them.

Drivers are reached through `hal.registry` alone. Only `fleet` and benchmarks come in.
"""
