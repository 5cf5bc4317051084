"""Which steps are drawn, and when: pure functions of seed, ledger and count. `sampler.Sampler` is the way in.

For `loading`; recipes choose from `target`.
"""
