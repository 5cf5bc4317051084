"""`benchmarks.buffer`, `benchmarks.buffer.load` and `benchmarks.buffer.scale`: the replay buffer beside its peers."""
