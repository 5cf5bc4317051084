"""`benchmarks.main_job`: `vla-fleet up` as a user runs it, one row a commit."""
