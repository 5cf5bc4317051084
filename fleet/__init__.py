"""The composition root: configs, recipes and the `vla-fleet` command line."""
