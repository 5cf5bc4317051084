"""Which action of which chunk belongs to a tick, when chunks arrive late.

`factory` makes the `ChunkScheduler` (`scheduler`) a checkpoint was trained for, one file a strategy below `strategies`.
They share `request_tracker` (what is asked, answered, and how long that takes) and `action_predictor`.
"""
