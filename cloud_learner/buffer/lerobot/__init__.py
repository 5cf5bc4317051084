"""LeRobot datasets, out of the buffer and into it.

For `vla-fleet buffer export-lerobot` and `import-lerobot`.
"""
