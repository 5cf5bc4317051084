"""Training on what is recorded, without a fleet: no gateway, no robots, no versions."""
