"""Which robot works on what, from which seed. Pure: no clock, no randomness, no threads.

For `cloud_learner.dispatch`, which gives it the time and tells robots what it decides.
"""

from hal.scheduler.decision import REST, Decision, SchedulerConfig, job_of
from hal.scheduler.jobs import KINDS, Done
from hal.scheduler.scheduler import Scheduler
from hal.scheduler.seeds import HELD_OUT_SEEDS
from hal.scheduler.tasks import TaskCount

__all__ = ["HELD_OUT_SEEDS", "KINDS", "REST", "Decision", "Done", "Scheduler", "SchedulerConfig", "TaskCount", "job_of"]
