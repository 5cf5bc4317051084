"""What is measured against peers: `python -m benchmarks.NAME [--quick] [--json FILE] [--write]`.

One module or folder for each table in docs/results. Nobody imports it.
"""
