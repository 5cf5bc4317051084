"""Which steps are drawn, and when: pure functions of seed, ledger and count. `plan.SamplingPlanner` is the way in.

For `loading`; recipes choose from `target`.
"""
