"""A driver in a process of its own (`server`), and its proxy in the control process (`proxy`).

The server holds the robot when control is late or gone. `protocol` is what the two say to each other.
"""
