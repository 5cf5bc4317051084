"""The flight recorder: what crossed the borders of the control loop, tick by tick, so that it can be decided again.

The loop is a function of what its robot, its two lines, its clock and its scripted operator gave it. `recorder` logs
that while the robot works, `replay` feeds it to a loop built alike and compares what that loop sends and writes.
Read in this order: `events` (what a tick is on disk), `snapshot` (where a replay may begin), `recorder`, `writer`,
`file`, `replay`; `rows`, `show` and `view` are for people.
"""
