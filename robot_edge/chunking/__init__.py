"""Which action of which chunk belongs to a tick, when chunks are asked for, and how long they take.

`factory` makes the strategy that a checkpoint was trained for; `base` is what the loop sees of it.
"""
