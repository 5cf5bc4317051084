"""`benchmarks.fleet_scaling`: how much faster more robots learn, and a fleet that waits for nobody."""
