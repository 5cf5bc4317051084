"""Which steps are imitated, how a batch is changed, what the loss is: one module for each algorithm.

A frozen config and `loss(policy, batch, config, rng)`; of a policy it knows `policies.interface.policy` alone.
"""
