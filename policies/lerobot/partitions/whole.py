"""Any other type of lerobot policy, undivided: the latent is the pictures and words, `act` does everything."""

from __future__ import annotations

from collections import deque

import torch
from lerobot.utils.constants import (
    ACTION,
    OBS_IMAGES,
    OBS_LANGUAGE_ATTENTION_MASK,
    OBS_LANGUAGE_TOKENS,
    OBS_STATE,
)
from torch import Tensor

from policies.lerobot.partitions.partition import Guide, Latents, Network, PolicyPartition, Tensors
from wire.errors import ConfigError

_WORDS = (OBS_LANGUAGE_TOKENS, OBS_LANGUAGE_ATTENTION_MASK)


class WholePartition(PolicyPartition):
    """`think` only keeps what it is shown; `act` is lerobot's `predict_action_chunk`."""

    draws = True

    def horizon(self, policy: Network) -> int:
        for name in ("chunk_size", "action_chunk_size", "n_action_steps", "horizon"):
            if isinstance(value := getattr(policy.config, name, None), int):
                return value
        raise ConfigError(
            f"lerobot policy of type '{policy.name}': its configuration does not say how long a chunk is."
        )

    def think(self, policy: Network, batch: Tensors) -> Latents:
        """bool[1, n], which pictures of the configuration and which words there are; then those, preprocessed."""
        names = (*policy.config.image_features, *_WORDS)
        there = torch.tensor([[name in batch for name in names]])
        return [there, *(batch[name] for name in names if name in batch)]

    def act(
        self, policy: Network, latent: Latents, batch: Tensors, noise: Tensor | None, guide: Guide | None
    ) -> Tensor:
        """What `predict_action_chunk` gives; a policy with queues of observations finds them filled."""
        steps = policy.config.n_obs_steps
        names = (*policy.config.image_features, *_WORDS)
        there = latent[0].reshape(-1, len(names))[-1].tolist()
        whole = batch | dict(
            zip((n for n, is_there in zip(names, there, strict=True) if is_there), latent[1:], strict=True)
        )
        for name in _WORDS:
            if steps > 1 and name in whole:
                whole[name] = whole[name][:, -1]
        policy.reset()
        queues = getattr(policy, "_queues", None)
        if isinstance(queues, dict) and OBS_STATE in queues:
            if pictures := [whole[name] for name in policy.config.image_features if name in whole]:
                whole[OBS_IMAGES] = torch.stack(pictures, -4)
            for name, queue in queues.items():
                if name != ACTION and isinstance(queue, deque) and name in whole:
                    queue.extend(whole[name].unbind(1) if steps > 1 else [whole[name]] * (queue.maxlen or 1))
        return policy.predict_action_chunk(whole)[:, : self.horizon(policy)]

    def loss(self, policy: Network, batch: Tensors) -> Tensor:
        """lerobot's own, over its number of actions; whether it heeds `action_is_pad` is up to the type."""
        loss: Tensor = policy.forward(batch)[0]
        return loss
