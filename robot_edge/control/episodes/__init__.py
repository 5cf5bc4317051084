"""Episodes on a robot: how they begin and end, what a person says of them, and what is recorded.

Only the control loop comes in.
"""
