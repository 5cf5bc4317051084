"""Cameras by name, and what they share: a thread that keeps the newest picture.

Asked for through `hal.registry`; nothing here is imported before.
"""
