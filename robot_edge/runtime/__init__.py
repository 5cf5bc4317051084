"""Processes of a robot computer: how they start, watch each other, share frames and end."""
