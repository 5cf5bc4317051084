"""Policies of lerobot behind the fast/slow interface: they act on the edge and go on learning in the fleet.

lerobot itself is imported only below this package, when a checkpoint is opened. Written against lerobot 0.4.4; what is
used of it is the same in 0.6: `PreTrainedConfig` with its registry of types, `get_policy_class`, `forward`,
`predict_action_chunk`, and `PolicyProcessorPipeline.from_pretrained` and `save_pretrained` with `overrides`.
"""
