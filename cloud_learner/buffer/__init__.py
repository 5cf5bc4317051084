"""The persistent experience of the fleet.

ledger/     what exists and where it lies (SQL)
store/      bytes: journal and shards (zarr)
upkeep/     sealing, checking, forgetting, rewriting, migrating
sampling/   which steps are drawn, and when (pure)
feeding/    batches for a trainer
lerobot/    datasets in and out

Each may use those above it. `place.py` opens them all, `check.py` says what may be stored, `files.py` writes whole
files, `fake.py` makes episodes nobody drove.
"""
