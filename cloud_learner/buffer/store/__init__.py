"""Bytes: a journal for what came last, shards of zarr arrays for the rest. `store.SegmentStore` is the way in.

For the gateway, which appends, and for `maintenance` and `loading`, which read.
"""
