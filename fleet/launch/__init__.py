"""How processes are specified, built, started and kept running; `up` runs a whole fleet.

For the rest of `fleet`; `factories` makes the objects of a process, `builders` and `robot_builders` run it.
"""
