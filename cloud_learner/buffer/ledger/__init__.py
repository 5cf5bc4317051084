"""What exists and where it lies: one SQL database, SQLite or PostgreSQL. `ledger.Ledger` is the way in.

For everything in the cloud that stores or asks; the other modules are for `Ledger`, `rows` is what it answers.
"""
