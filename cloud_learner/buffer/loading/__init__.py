"""Batches: reading, decoding and keeping in memory what the plan asks for. `dataset.ReplayDataset` is the way in.

For trainers and benchmarks.
"""
