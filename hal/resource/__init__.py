"""A robot as something that can be scheduled: what it can do, how it is and who holds it. Pure: no threads."""

from hal.resource.capabilities import capabilities_of, unmet
from hal.resource.health import Health, HealthConfig, HealthWatch, Report
from hal.resource.lease import Leases, Priority
from hal.resource.roster import Change, Roster

__all__ = [
    "Change",
    "Health",
    "HealthConfig",
    "HealthWatch",
    "Leases",
    "Priority",
    "Report",
    "Roster",
    "capabilities_of",
    "unmet",
]
