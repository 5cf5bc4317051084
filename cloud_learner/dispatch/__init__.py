"""Who works on what: the gateway's side of robots, jobs and leases, and of those who ask for them.

`dispatcher.Dispatcher` is the way in, for the gateway; `hal.scheduler` decides.
"""
