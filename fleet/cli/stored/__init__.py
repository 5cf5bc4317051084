"""Commands on what a fleet has stored: the buffer, its exchange with LeRobot, and what is kept apart.

For `fleet/cli/__main__.py`.
"""
