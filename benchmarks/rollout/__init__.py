"""How well a rollout tells good versions from bad ones, on a simulated fleet."""
