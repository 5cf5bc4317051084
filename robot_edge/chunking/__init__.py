"""Which action of which chunk belongs to a tick, when chunks arrive late.

`factory` makes the `ChunkScheduler` (`scheduler`) a checkpoint was trained for, one file a strategy below `strategies`.
Some of them look ahead with `action_predictor`.
"""
