"""What `benchmarks.edge_latency` is put together from: a stand-in arm, the edges that drive it, and the measuring."""
