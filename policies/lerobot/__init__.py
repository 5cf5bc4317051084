"""Policies of lerobot behind the fast/slow interface: they act on the edge and go on learning in the fleet.

lerobot (0.4.4) is imported only when a checkpoint is opened. Others come in by name (`factory`).
"""
