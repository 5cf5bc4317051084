"""Strategies for actions that arrive late, one file each.

Only `chunking.factory` may come in; it knows them by name.
"""
