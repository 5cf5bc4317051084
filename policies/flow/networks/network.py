"""The network of the flow policy: a slow path from images and words to a latent, a fast path from there to actions.

Shapes: b images, k steps behind each image, z latent, ds state, H actions of da numbers, L words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from policies.common.batches import count_kept
from policies.common.normalizer import Normalizer
from policies.flow.config import FlowConfig
from policies.flow.networks.editor import ChunkEditor
from policies.flow.networks.exploration import NoiseHead
from policies.flow.networks.fast import Conditioning, FastMLP
from policies.flow.networks.outlook import Outlook
from policies.flow.networks.residual import Residual
from policies.flow.networks.slow import ConvSlowPath, FutureStateHead, TokenSlowPath
from policies.flow.networks.transformer import FastTransformer
from policies.flow.networks.vlm import Backbone, VlmSlowPath
from policies.interface.capabilities import GOOD, UNKNOWN

ROUGH_STEPS = 2
"""Euler steps to the actions that the corrector learns to correct"""
ADVANTAGE_DROPPED = 0.3
"""share of the samples whose advantage is hidden in training (RECAP, arXiv 2511.14759)"""


class FlowNetwork(nn.Module):
    """Both paths and the state's statistics. Actions are normalised to [-1, 1] on both sides."""

    image_losses: torch.Tensor | None = None
    """float32[b]: the flow loss behind each image of the last `loss`"""

    slow: ConvSlowPath | TokenSlowPath | VlmSlowPath

    def __init__(self, config: FlowConfig, vlm: Path | None = None, random_vlm: bool = False) -> None:
        """`vlm`: where the backbone lies on this machine, if `config` has one; see `vlm.Backbone` for the errors."""
        super().__init__()
        self.config = config
        self.normalizer = self._make_normalizer(config)
        self.slow = self._make_slow(config, vlm, random_vlm)
        self.latent_width = self.slow.width + (config.state_dim if config.ego_motion else 0)
        """z"""
        self.fast = self._make_fast(config)
        if config.ahead:
            self.future_state_head = FutureStateHead(self.latent_width, config.state_dim, len(config.ahead))
        if config.residual:
            self.residual = Residual(config, self.latent_width)
        if config.outlook:
            self.outlook = Outlook(config, self.latent_width)
        self.noise_head = NoiseHead(config, self.latent_width) if config.explore == "noise" else None
        if config.editor:
            self.editor = ChunkEditor(config, self.latent_width)

    def _make_normalizer(self, config: FlowConfig) -> Normalizer:
        return Normalizer(config.state_dim, config.online_statistics)

    def _make_slow(
        self, config: FlowConfig, vlm: Path | None, random_vlm: bool
    ) -> ConvSlowPath | TokenSlowPath | VlmSlowPath:
        if config.vlm is not None:
            return VlmSlowPath(config, Backbone(vlm, config.vlm, random_vlm))
        return TokenSlowPath(config) if config.pooler else ConvSlowPath(config)

    def _make_fast(self, config: FlowConfig) -> FastTransformer | FastMLP:
        return FastTransformer(config) if config.transformer else FastMLP(config, self.latent_width)

    def encode(self, images: Sequence[torch.Tensor], tokens: torch.Tensor, seen_state: torch.Tensor) -> torch.Tensor:
        """The latent, float[b, z]: what the slow path makes of images and words, and with `config.ego_motion` the state
        [b, ds] of that moment, normalised."""
        latent = self.slow(images, tokens)
        if not self.config.ego_motion:
            return latent
        return torch.cat([latent, self.normalizer(seen_state).to(latent.dtype)], 1)

    def loss(
        self,
        images: Sequence[torch.Tensor],
        tokens: torch.Tensor,
        arrays: Mapping[str, torch.Tensor],
        *,
        by_sample: bool = False,
    ) -> torch.Tensor:
        """Conditional flow matching, the mean over the actions that `mask` keeps; `by_sample`: [b, k], each one's.

        Lipman et al. 2023, arXiv 2210.02747, equation 23 with sigma_min = 0, noise e and actions a:

            x_t = (1 - t) e + t a,   t ~ U(0, 1),   loss = |v(x_t, t) - (a - e)|^2

        With `predict = "action"` the network gives a, from which v = (a - x_t) / (1 - t) follows, and the loss is
        |a(x_t, t) - a|^2, which is the one above times (1 - t)^2: near t = 1 it asks less.

        With `ahead`, a head on the latent also predicts how far the person will have moved the robot by then, in
        standard deviations of the state. Actions of an operator are mostly full speed one way or the other: they tell
        where the goal is only at the moment it is reached. Where the hand will be tells it at every step, and so
        teaches the slow path to find the goal in the picture (Dosovitskiy and Koltun 2017, arXiv 1611.01779: learning
        to act by predicting the future state at several offsets). Nothing of the head is used to act.

        With `config.prefix`, every second sample has its first p ~ U{1..min(max_offset, H - 1)} actions committed:
        they enter clean, as at flow time 1, the network is told which they are, and the loss is on the others
        (training-time real-time chunking, arXiv 2512.05964). Of these prefixes, `config.prefix_swap` are another
        sample's, so that the network does not learn to repeat them (a danger that Xiaomi-Robotics-0, arXiv
        2602.12684, reports).

        With `config.advantage` the fast path is told whether the actions were good, and in 30 % of the samples it is
        not, so that it can do without (RECAP, arXiv 2511.14759). What is imitated counts as good unless `advantage`
        says otherwise.

        With `config.online_statistics` the states are normalised by what was known before this batch, which then takes
        part in what is known; only while gradients are wanted.

        With `config.residual` and `later_state`, the corrector's loss is added; see `Residual`. It moves nothing else.

        images: uint8[b, h, w, 3] per camera; tokens: int64[b, L]; arrays: those that `FlowPolicy.loss` names, as
        `read_steps` gives them, the actions normalised, later_index and advantage int64. For a shared network also
        `embodiment` int64[], and which columns are the robot's: `state_dims` bool[ds], `action_dims` bool[da].
        """
        state = arrays["state"]
        latent = self.encode(images, tokens, arrays.get("seen_state", state[:, 0]))
        loss = self._loss(latent, arrays, by_sample)
        if self.config.online_statistics and self.training and torch.is_grad_enabled():
            # afterwards: a sample must not be normalised by what the others of its batch bring
            self.normalizer.update(state)
        return loss

    def _loss(self, latent: torch.Tensor, arrays: Mapping[str, torch.Tensor], by_sample: bool) -> torch.Tensor:
        state, actions, mask, age = arrays["state"], arrays["actions"], arrays["mask"], arrays.get("frame_age")
        flow_mask, committed = mask, None
        dims = arrays.get("action_dims")
        kept = _kept(mask, actions, dims)
        # what is masked is no action: its values must reach neither the input nor the loss
        target = actions.flatten(2).where(kept, 0.0)
        noise = torch.randn_like(target)
        if dims is not None:
            noise = noise * dims.repeat(self.config.horizon)
        time = torch.rand_like(target[..., :1])
        noisy = (1 - time) * noise + time * target
        if self.config.prefix:
            known = self._draw_committed(mask)
            committed, flow_mask = known.float(), mask & ~known
            entered = self._swap(target, known, mask)
            noisy = torch.where(known[..., None].expand_as(actions).flatten(2), entered, noisy)
            kept = _kept(flow_mask, actions, dims)
        advantage = self._with_dropout(arrays.get("advantage"), mask) if self.config.advantage else None
        given = Conditioning(latent, self.normalizer(state), age, committed, advantage, arrays.get("embodiment"))
        output = self.fast(given, noisy, time).float()
        wanted = target if self.config.predict == "action" else target - noise
        errors = (output - wanted).square() * kept
        loss = errors.sum(2) / kept.sum(2).clamp_min(1) if by_sample else errors.sum() / count_kept(kept.sum())
        self.image_losses = (errors.detach().sum((1, 2)) / kept.sum((1, 2)).clamp_min(1)).float()
        if self.config.residual and "later_state" in arrays:
            base = self._rough(given._replace(committed=None)).unflatten(-1, actions.shape[2:])
            clean = target.unflatten(-1, actions.shape[2:])
            later, index = self.normalizer(arrays["later_state"]), arrays["later_index"]
            loss = loss + self.residual.loss(latent, later, index, base, clean, mask, age)
        if not self.config.ahead:
            return loss
        moved = (arrays["ahead"] - state[:, :, None]) / self.normalizer.std
        missed = self.future_state_head.errors(latent, given.state, moved)
        if (there := arrays.get("state_dims")) is not None:
            missed = missed[..., there]
        return loss + self.config.ahead_weight * missed.mean()

    def velocity(self, given: Conditioning, actions: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """float[b, k, H * da] of the flow at actions [b, k, H * da] and time [b, k, 1] below 1."""
        output = self.fast(given, actions, time).float()
        return output if self.config.predict != "action" else (output - actions) / (1 - time)

    def _draw_committed(self, mask: torch.Tensor) -> torch.Tensor:
        """bool[b, k, H]: actions that count as committed, always real ones and never all of a sample."""
        most = min(self.config.max_offset, self.config.horizon - 1)
        count = torch.randint(1, most + 1, mask.shape[:2], device=mask.device)
        count = count * (torch.rand(mask.shape[:2], device=mask.device) < 0.5)
        run = mask.long().cumprod(-1).sum(-1)
        return torch.arange(self.config.horizon, device=mask.device) < torch.minimum(count, run - 1)[..., None]

    def _swap(self, target: torch.Tensor, known: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[b, k, H * da] `target`, some samples with what the next image's sample did; only where that is real."""
        unreal = (known & ~mask.roll(1, 0)).any(-1, keepdim=True)
        swapped = torch.rand(unreal.shape, device=mask.device) < self.config.prefix_swap
        return torch.where(swapped & ~unreal, target.roll(1, 0), target)

    def _with_dropout(self, advantage: torch.Tensor | None, mask: torch.Tensor) -> torch.Tensor:
        """int64[b, k]: the advantage, hidden in some samples."""
        if advantage is None:
            advantage = torch.full(mask.shape[:2], GOOD, device=mask.device)
        hidden = torch.rand(mask.shape[:2], device=mask.device) < ADVANTAGE_DROPPED
        return advantage.masked_fill(hidden, UNKNOWN)

    @torch.no_grad()
    def _rough(self, given: Conditioning) -> torch.Tensor:
        """[b, k, H * da] in [-1, 1]: what the policy would do, in fewer steps than `sample` takes."""
        shape = given.state.shape[:2]
        actions = torch.randn(*shape, self.config.horizon * self.config.action_dim, device=given.state.device)
        for step in range(ROUGH_STEPS):
            time = actions.new_full((*shape, 1), step / ROUGH_STEPS)
            output = self.fast(given, actions, time).float()
            if self.config.predict == "action":
                actions = torch.lerp(actions, output, 1 / (ROUGH_STEPS - step))
            else:
                actions = actions + output / ROUGH_STEPS
        return actions.clamp(-1, 1)


def _kept(mask: torch.Tensor, actions: torch.Tensor, dims: torch.Tensor | None) -> torch.Tensor:
    """bool[b, k, H * da]: what is learned, of actions that bool[b, k, H] keeps and dimensions that bool[da] has."""
    kept = mask[..., None] if dims is None else mask[..., None] & dims
    return kept.expand_as(actions).flatten(2)
