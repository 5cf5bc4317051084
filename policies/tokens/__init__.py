"""Action tokenisers (numpy), and a policy that speaks their tokens (torch).

Others come in by name (`factory`).
"""
