"""What runs policies without a robot's processes: rollouts, the evaluator, demonstrations, a fleet in one process.

For the evaluator's process, benchmarks and tests.
"""
