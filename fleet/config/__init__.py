"""What a run is made of: recipes, overrides of them, the data directory.

Imports nothing heavy, so that every process can read it first.
"""
