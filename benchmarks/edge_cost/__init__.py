"""`benchmarks.edge_cost`: processor time and copies of one control tick."""
