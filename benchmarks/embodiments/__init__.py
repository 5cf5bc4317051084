"""`benchmarks.embodiments`: robots of two shapes in one run, and a third that joins."""
