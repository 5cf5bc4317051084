"""What runs policies without a robot's own processes: rollouts, the evaluator, demonstrations, a fleet in one process.

Used by the evaluator's process, by benchmarks and by tests.
"""
