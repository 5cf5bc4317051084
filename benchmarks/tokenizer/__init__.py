"""What `benchmarks.tokenizer` is made of: data of three robots, and the baselines."""
