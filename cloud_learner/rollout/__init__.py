"""Which robot acts by which version, and which versions' files may go: pure logic, without files, threads or clocks.

`controller.RolloutController` is the way in, for the gateway.
"""
