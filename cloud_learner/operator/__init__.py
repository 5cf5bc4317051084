"""The operator page: what the fleet does, in a browser, and the commands that people send back.

`view.FleetView` holds what is known, `sessions` who may move which robot, `app` serves both. For the gateway.
"""
