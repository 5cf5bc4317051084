"""`benchmarks.buffer` and `benchmarks.buffer.load`: the replay buffer beside its peers."""
