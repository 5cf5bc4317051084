"""Which robot works on what, from which seed. Pure: no clock, no randomness, no threads.

For `cloud_learner.dispatch`, which gives it the time and tells robots what it decides.
"""
