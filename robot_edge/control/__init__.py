"""The control process: one robot's loop, and what decides who moves it.

`loop` is one tick; `mode` says who is in control and why a robot holds. No torch, no disk, no network.
"""
