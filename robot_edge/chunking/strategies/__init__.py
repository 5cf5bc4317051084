"""Strategies for actions that arrive late, one file each; `chunking.factory` knows them by name."""
