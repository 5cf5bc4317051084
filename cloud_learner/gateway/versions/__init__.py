"""Versions at the gateway: taken in, tried, measured, announced, handed out."""
