"""Parts of `benchmarks.restart`: a fleet to kill processes of, and what tells that they work again."""
