"""Parts of `benchmarks.scheduler`: the simulated world, the bound, what the scheduler is compared with."""
