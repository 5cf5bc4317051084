"""The uplink process: recorded steps to the gateway; weights, jobs and commands from it.

What the gateway has not acknowledged lies in the spool.
"""
