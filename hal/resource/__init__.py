"""A robot as something that can be scheduled: what it can do, how it is and who holds it. Pure: no threads.

For `hal.scheduler` and `cloud_learner`.
"""
