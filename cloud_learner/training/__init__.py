"""The trainer process: gradient steps (`learner`), checkpoints, versions on their way to the gateway (`publisher`).

`trainer.Trainer` is its loop. `fleet.launch` starts it.
"""
