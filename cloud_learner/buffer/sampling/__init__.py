"""Which steps are drawn, and when: pure functions of seed, ledger and count."""
