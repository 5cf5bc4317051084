"""What is measured against peers: `python -m benchmarks.NAME [--quick] [--json FILE] [--write]`."""
