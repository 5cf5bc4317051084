"""How processes are specified, built, started and kept running; `up` runs a whole fleet.

For `fleet.cli`, `fleet.tools` and `fleet.ray_backend`; `builders` makes what a process runs.
"""
