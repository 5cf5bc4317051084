"""The embedded scheduler's side of the gateway: robots, leases and jobs, and those who ask for them.

`dispatcher.Dispatcher` is what the gateway talks to; `people` knows who drives or stops a robot, `calls` answers
consoles and teleoperators, `book` keeps what must outlive a kill, `canary` turns an evaluation into a measurement.
"""
