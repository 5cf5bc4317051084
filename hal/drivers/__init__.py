"""Robots by name: one module or folder for each driver.

Asked for through `hal.registry`; nothing here is imported before, and the edge never imports a driver.
"""
