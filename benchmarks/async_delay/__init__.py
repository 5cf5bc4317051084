"""`benchmarks.async_delay`: strategies for late actions, compared at equal training."""
