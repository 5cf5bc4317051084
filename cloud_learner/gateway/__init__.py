"""The process every robot and trainer connects to: sessions, ingest, weights.

It stores what robots send, acknowledges after commit, and hands out versions and commands. Started by
`fleet.launch.builders`; robots reach it through messages only.
"""
