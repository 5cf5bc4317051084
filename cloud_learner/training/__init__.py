"""The trainer process: gradient steps, checkpoints, publishing of versions.

`trainer` is its loop, `learner` the gradient step, `publisher` the way of a version to the gateway. Started by
`fleet.launch.builders`.
"""
