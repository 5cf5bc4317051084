"""The composition root: recipes, processes and the `vla-fleet` command line.

May import every room; no room imports it.
"""
