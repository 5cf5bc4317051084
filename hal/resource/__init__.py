"""A robot as something that can be scheduled: what it can do, how it is and who holds it. Pure: no threads.

For `hal.scheduler` and `cloud_learner`.
"""

from hal.resource.capabilities import capabilities_of
from hal.resource.health import RobotHealth
from hal.resource.lease import Leases, Priority

__all__ = ["Leases", "Priority", "RobotHealth", "capabilities_of"]
