"""Bytes: a journal for what came last, shards of zarr arrays for the rest."""
