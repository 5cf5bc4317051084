"""The `vla-fleet` command line, one module for a group of commands.

Options are parsed and errors shown here; the work is done in `fleet.launch` and `fleet.tools`.
"""
