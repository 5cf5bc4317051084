"""What `benchmarks.policies` measures: which policies, and how each is measured in a process of its own."""
