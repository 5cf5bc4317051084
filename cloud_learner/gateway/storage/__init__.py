"""What the gateway does with disk, ledger and object store, in threads that may wait for them.

`cloud_learner.gateway` hands work in and gets results back; only at the start does anybody else call these.
"""
