"""How processes are specified, built, started and kept running; `up` runs a whole fleet.

For the rest of `fleet`; `builders` and `robot_builders` make what a process runs.
"""
