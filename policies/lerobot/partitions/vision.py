"""ACT and Diffusion: the slow path is the vision backbone, the fast one everything else. And any other type, undivided.

`act` runs lerobot's own forward. The vision backbone of the first two is replaced by a module that passes on what it is
given, and what it is given in place of the pictures are the features that `think` made of them, so nothing of the
network is written twice and the result is bit for bit that of lerobot's `predict_action_chunk`.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from policies.common.batches import count_kept
from policies.lerobot.partitions.partition import (
    ACTION,
    PAD,
    PICTURES,
    STATE,
    WORDS,
    Guide,
    Latents,
    Network,
    PolicyPartition,
    Tensors,
)
from wire.errors import ConfigError


class VisionPartition(PolicyPartition):
    """One whose slow path is the vision backbone."""

    _backbone: tuple[str, str]
    """where it is in lerobot's policy: the name of a module, and that of one in it"""

    def __init__(self) -> None:
        self._headless: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()

    def _without_backbone(self, policy: Network, stand_in: Callable[[Any], nn.Module]) -> Any:
        """`policy` with a module there that passes on what it is given; all else is the same, not a copy of it."""
        if policy not in self._headless:
            outer, inner = self._backbone
            twin = self._headless[policy] = copy.copy(policy)
            part = copy.copy(policy._modules[outer])
            part._modules = part._modules | {inner: stand_in(part._modules[inner])}
            twin._modules = policy._modules | {outer: part}
        return self._headless[policy]


class ActPartition(VisionPartition):
    """Action chunking transformer (Zhao et al. 2023, arXiv 2304.13705)."""

    _backbone = "model", "backbone"
    # Its decoder begins with zeros: without a norm before, the first self-attention sees only its own biases.
    _FIRST = frozenset({"model.decoder.layers.0.self_attn.in_proj_weight"})

    lora_targets = ("*encoder.layers.*.linear*", "*decoder.layers.*.linear*")

    def unreached(self, policy: Network) -> frozenset[str]:
        return frozenset() if policy.config.pre_norm else self._FIRST

    def think(self, policy: Network, batch: Tensors) -> Latents:
        """The backbone's last feature map of each camera, [1, c, h / 32, w / 32]."""
        return [policy.model.backbone(batch[name])["feature_map"] for name in policy.config.image_features]

    def act(
        self, policy: Network, latent: Latents, batch: Tensors, noise: Tensor | None, guide: Guide | None
    ) -> Tensor:
        features = dict(zip(policy.config.image_features, latent, strict=True))
        return self._without_backbone(policy, lambda backbone: _FeatureMap()).predict_action_chunk(batch | features)

    def loss(self, policy: Network, batch: Tensors) -> Tensor:
        """L1 + kl_weight * KL, eq. of algorithm 1 in arXiv 2304.13705, the L1 as a mean over the kept actions.

        lerobot's own divides by the number of all actions: then a batch with many masked ones would count less.
        """
        images = [batch[name] for name in policy.config.image_features]
        chosen, (mean, log_variance) = policy.model(batch | {PICTURES: images})
        kept = ~batch[PAD][..., None].expand_as(chosen)
        error = ((chosen - batch[ACTION]).abs() * kept).sum() / count_kept(kept.sum())
        if not policy.config.use_vae:
            return error
        divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(-1).mean()
        return error + policy.config.kl_weight * divergence


class DiffusionPartition(VisionPartition):
    """Diffusion policy (Chi et al. 2023, arXiv 2303.04137) with lerobot's U-Net.

    Its trajectory begins `n_obs_steps - 1` ticks in the past, a chunk at the newest observation. Recorded windows begin
    there as well: the actions before are taken to be copies of the first one, as lerobot pads the begin of an episode,
    and are learned as such, so that sampling sees there what training did. Those that are masked at the end are not
    learned.
    """

    _backbone = "diffusion", "rgb_encoder"
    draws = True
    lora_targets = ("*unet*.cond_encoder.1", "*diffusion_step_encoder.*")

    def horizon(self, policy: Network) -> int:
        return int(policy.config.n_action_steps)

    def noise_shape(self, policy: Network) -> tuple[int, ...]:
        return (1, policy.config.horizon, policy.config.action_feature.shape[0])

    def think(self, policy: Network, batch: Tensors) -> Latents:
        """The image encoder's features of all cameras, [1, cameras, f]."""
        images = [batch[name] for name in policy.config.image_features]
        encoder = policy.diffusion.rgb_encoder
        if isinstance(encoder, nn.ModuleList):
            return [torch.stack([one(image) for one, image in zip(encoder, images, strict=True)], 1)]
        return [encoder(torch.cat(images))[None]]

    def act(
        self, policy: Network, latent: Latents, batch: Tensors, noise: Tensor | None, guide: Guide | None
    ) -> Tensor:
        features = latent[0] if policy.config.n_obs_steps > 1 else latent[0][:, None]  # [1, n_obs_steps, cameras, f]
        state = batch[STATE] if policy.config.n_obs_steps > 1 else batch[STATE][:, None]
        diffusion = self._without_backbone(policy, _identity).diffusion
        return diffusion.generate_actions({STATE: state, PICTURES: features}, noise=noise)

    def arrange(self, policy: Network, batch: Tensors) -> Tensors:
        """Actions and their padding from the first observation's tick on, `horizon` of them."""
        earlier = policy.config.n_obs_steps - 1
        later = policy.config.horizon - earlier - batch[ACTION].shape[1]
        actions, pad = batch[ACTION], batch[PAD]
        actions = torch.cat([actions[:, :1].expand(-1, earlier, -1), actions], 1)
        pad = torch.cat([pad[:, :1].expand(-1, earlier), pad], 1)
        if later > 0:
            actions = torch.cat([actions, actions[:, -1:].expand(-1, later, -1)], 1)
            pad = torch.cat([pad, pad.new_ones(len(pad), later)], 1)
        changed = batch | {ACTION: actions, PAD: pad}
        if not earlier:
            changed[STATE] = batch[STATE][:, None]
        return changed

    def loss(self, policy: Network, batch: Tensors) -> Tensor:
        """Mean squared error of the predicted noise (eq. 5 of arXiv 2303.04137) over the actions that are kept.

        lerobot's own masks them on request, but divides by the number of all.
        """
        policy.config.do_mask_loss_for_padding = True
        loss, _ = policy(batch)
        kept = ~batch[PAD]
        return loss * (kept.numel() / kept.sum())


def _identity(encoder: Any) -> nn.Module:
    return nn.ModuleList(nn.Identity() for _ in encoder) if isinstance(encoder, nn.ModuleList) else nn.Identity()


class _FeatureMap(nn.Module):
    """Stands where torchvision's feature extractor does."""

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        return {"feature_map": features}


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
        names = (*policy.config.image_features, *WORDS)
        there = torch.tensor([[name in batch for name in names]])
        return [there, *(batch[name] for name in names if name in batch)]

    def act(
        self, policy: Network, latent: Latents, batch: Tensors, noise: Tensor | None, guide: Guide | None
    ) -> Tensor:
        """What `predict_action_chunk` gives; a policy with queues of observations finds them filled."""
        steps = policy.config.n_obs_steps
        names = (*policy.config.image_features, *WORDS)
        there = latent[0].reshape(-1, len(names))[-1].tolist()
        whole = batch | dict(
            zip((n for n, is_there in zip(names, there, strict=True) if is_there), latent[1:], strict=True)
        )
        for name in WORDS:
            if steps > 1 and name in whole:
                whole[name] = whole[name][:, -1]
        policy.reset()
        queues = getattr(policy, "_queues", None)
        if isinstance(queues, dict) and STATE in queues:
            if pictures := [whole[name] for name in policy.config.image_features if name in whole]:
                whole[PICTURES] = torch.stack(pictures, -4)
            for name, queue in queues.items():
                if name != ACTION and isinstance(queue, deque) and name in whole:
                    queue.extend(whole[name].unbind(1) if steps > 1 else [whole[name]] * (queue.maxlen or 1))
        return policy.predict_action_chunk(whole)[:, : self.horizon(policy)]

    def loss(self, policy: Network, batch: Tensors) -> Tensor:
        """lerobot's own, over its number of actions; whether it heeds `action_is_pad` is up to the type."""
        loss: Tensor = policy(batch)[0]
        return loss
