"""What commands do beside running a fleet: diagnosis, plots, reports, policies, teleoperation.

Called by `fleet.cli`.
"""
