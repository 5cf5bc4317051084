"""The persistent experience of the fleet. Rooms, each may use those before it: `ledger` what exists (SQL), `store`
bytes, `maintenance`, `sampling` which steps are drawn, `loading` batches, `lerobot` datasets in and out.
`location` opens them all, `check` says what may be stored.
"""
