"""The persistent experience of the fleet: store, ledger and sampler."""
