"""A version that a robot computes beside the one it acts by: the same observations, other actions, none of which acts.

`runner` is a process of its own, which has no way to control; `tap` is what inference gives it.
"""
