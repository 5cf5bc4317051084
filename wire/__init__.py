"""The shared language of the fleet: types, messages, codec, transport, clock and errors.

Everybody may come in; nothing of the project is imported here.
"""
