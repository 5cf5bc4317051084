"""What crossed the borders of the control loop, tick by tick, so that it can be decided again.

`borders` wraps what the loop talks to, `recorder` notes it, `replay` plays it to a loop built alike and compares.
"""
