"""Which robot works on what, from which seed. Pure: no clock, no randomness, no threads.

For `cloud_learner.dispatch`, which gives it the time and tells robots what it decides.
"""

from hal.scheduler.decision import REST, Decision, SchedulerConfig, job_of
from hal.scheduler.jobs import Done
from hal.scheduler.scheduler import Scheduler
from hal.scheduler.seeds import HELD_OUT_SEEDS, TRAINING_SEEDS, lane
from hal.scheduler.tasks import SpreadConfig, TaskBalancer, TaskCount

__all__ = [
    "HELD_OUT_SEEDS",
    "REST",
    "TRAINING_SEEDS",
    "Decision",
    "Done",
    "Scheduler",
    "SchedulerConfig",
    "SpreadConfig",
    "TaskBalancer",
    "TaskCount",
    "job_of",
    "lane",
]
