"""The operator page: what the fleet does, in a browser, and the wishes people send back.

`view.FleetView` holds what is known, `desk.Desk` decides who may move which robot, `app` serves both.
"""
