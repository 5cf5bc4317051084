"""A robot as something that can be scheduled: what it can do, how it is and who holds it. Pure: no threads.

For `hal.scheduler` and `cloud_learner`.
"""

from hal.resource.capabilities import capabilities_of, missing_requirements
from hal.resource.health import HealthConfig, HealthReport, HealthWatch, RobotHealth
from hal.resource.lease import Leases, Priority
from hal.resource.roster import Change, RobotRegistry

__all__ = [
    "Change",
    "HealthConfig",
    "HealthReport",
    "HealthWatch",
    "Leases",
    "Priority",
    "RobotHealth",
    "RobotRegistry",
    "capabilities_of",
    "missing_requirements",
]
