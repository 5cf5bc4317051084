"""Which steps are imitated, how a batch is changed, what the loss is: one module for each algorithm.

An algorithm is a module with a frozen config and `loss(policy, batch, config, rng)`. All that it, the learner and the
trainer may ask of a policy stands here, and in `policies.interface.policy` with shapes and errors:

| of the policy | who asks | what for |
|---|---|---|
| `loss(batch)` | the algorithm | a scalar with a gradient; sets training mode itself; random numbers from torch alone |
| `module` | the learner | trains what `requires_grad`, averages that, copies buffers (`policies.interface.trainable`) |
| `save(module)` | the learner | the file that robots load, of the average |
| `horizon`, `ticks_ahead`, `max_offset`, `history`, `trained` | the feed | what batches have to bring |
| `set_normalization(examples)`, `pretrained` | the trainer | the first look at the data, or that none is needed |
| `image_losses` | the trainer | float32[b] or None; may be absent: then tasks are drawn alike (`adaptive_share`) |

A batch is the dict that `cloud_learner.buffer.loading.windows` documents; a policy reads what it needs of it.
"""
