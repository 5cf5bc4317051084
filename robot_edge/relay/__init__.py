"""A process of a site between its robots and the gateway: weights come through it, and segments go."""
