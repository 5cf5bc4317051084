"""What commands do beside running a fleet: diagnosis, plots, reports, policies, teleoperation.

For `fleet.cli`; `fleet.launch` takes the report, and builds and tries policies with it.
"""
