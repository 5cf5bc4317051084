"""Which robot works on what, from which seed. Pure: no clock, no randomness, no threads.

For `cloud_learner.dispatch`, which gives it the time and tells robots what it decides.
"""

from hal.scheduler.jobs import REST, Decision, Done, SchedulerConfig, job_of
from hal.scheduler.scheduler import Scheduler
from hal.scheduler.seeds import HELD_OUT_SEEDS

__all__ = ["HELD_OUT_SEEDS", "REST", "Decision", "Done", "Scheduler", "SchedulerConfig", "job_of"]
