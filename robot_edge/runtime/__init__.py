"""The processes of a robot's computer: how they start, watch each other, share frames and end.

For `fleet.launch`, and for your own program that keeps a robot (`process_group`).
"""
