"""One file per kind of robot."""
