"""Strategies for actions that arrive late: one small class each, one interface (`base`).

`choose.make_schedule` gives the one a checkpoint was trained for. They share `line` (what is asked, answered and how
long that takes), `planned` (one running chunk) and `foresight` (what will be executed, and whether it was).
"""
