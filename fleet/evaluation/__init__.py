"""What runs policies without a robot's processes: rollouts, the evaluator, demonstrations, injected latency.

For the processes of a fleet, benchmarks and tests.
"""
