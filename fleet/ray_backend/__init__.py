"""The parts of a fleet across the nodes of a Ray cluster; robots are custom resources of their nodes.

For `vla-fleet up --backend ray` and `vla-fleet ray-node`.
"""
