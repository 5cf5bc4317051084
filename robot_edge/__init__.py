"""Runs on the robot computer: control loop, inference, safety, recorder, spool and weight client."""
