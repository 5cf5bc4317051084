"""The persistent experience of the fleet.

ledger/     what exists and where it lies (SQL)
store/      bytes: journal and shards (zarr)
maintenance/  sealing, checking, forgetting, rewriting
sampling/   which steps are drawn, and when (pure)
loading/    batches for a trainer
lerobot/    datasets in and out

Each may use those above it. `place.py` opens them all, `check.py` says what may be stored, `files.py` writes whole
files, `fake.py` makes episodes nobody drove.
"""
