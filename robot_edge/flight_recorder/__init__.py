"""What crossed the borders of the control loop, tick by tick, so that it can be decided again.

`recorder` logs it, `replay` feeds it to a loop built alike and compares; `events` is what a tick is on disk.
"""
