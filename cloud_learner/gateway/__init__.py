"""The process that every robot and trainer connects to: sessions, ingest, weights.

It acknowledges after commit. `fleet.launch` starts it; everybody else reaches it by messages.
"""
