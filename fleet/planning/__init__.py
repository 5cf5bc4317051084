"""How large a fleet should be: how many robots keep its trainer busy on rollouts that are not stale, what limits first.

Only the command line comes in. `model` is arithmetic, `measured` finds its figures, `table` shows what came out.
"""
