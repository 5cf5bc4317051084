"""A driver in a process of its own, and the proxy that stands for it in the control process.

The server keeps the robot safe when control is late or gone. `protocol` is what the two say to each other.
"""
