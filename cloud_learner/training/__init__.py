"""The trainer process: gradient steps (`learner`), checkpoints, weights on their way to the gateway (`uploader`).

`trainer.Trainer` is its loop. `fleet.launch` starts it.
"""
