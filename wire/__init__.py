"""The shared language of the fleet: types, messages, codec, channels, clock and errors."""
