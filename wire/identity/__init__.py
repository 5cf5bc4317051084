"""Who may connect and what each role may say: key records as they stand, join tokens, what is refused and why.

For whoever opens a port, and for a robot that joins.
"""
