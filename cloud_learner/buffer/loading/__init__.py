"""Batches: reading, decoding and keeping in memory what the plan asks for."""
