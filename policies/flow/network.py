"""The network of the flow policy: a slow path from images and words to a latent, a fast path from there to actions.

Shapes: b images, k steps behind each image, z latent, ds state, H actions of da numbers, L words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from policies.flow import sampling
from policies.flow.config import Eye, FlowConfig
from policies.flow.residual import Residual
from policies.normalizer import Normalizer
from policies.text import PADDING

AGE_FREQUENCIES = 4
"""sines and cosines of the age"""
AGE_MARGIN = 4
"""ticks: training's ages are its offsets plus the age that the frames had already"""

ROUGH_STEPS = 2
"""Euler steps to the actions that the corrector learns to correct"""


class Encoder(nn.Module):
    """Image -> feature points, looking for what the words name.

    Spatial soft-max: Finn et al. 2016, arXiv 1509.06113, section IV. Words scale and shift the features: FiLM,
    Perez et al. 2018, arXiv 1709.07871, equation 2.
    """

    places: torch.Tensor
    """float32[2, cells]: x and y of each cell of the last features, in [-1, 1]"""

    def __init__(self, eye: Eye, config: FlowConfig) -> None:
        super().__init__()
        convolutions: list[nn.Module] = []
        channels, height, width = 3, eye.height, eye.width
        for layer in config.stem:
            padding = layer.kernel // 2 if layer.kernel % 2 else (layer.kernel - layer.stride) // 2
            if convolutions:
                convolutions.append(nn.ReLU())
            convolutions.append(nn.Conv2d(channels, layer.channels, layer.kernel, layer.stride, padding))
            channels = layer.channels
            height = (height + 2 * padding - layer.kernel) // layer.stride + 1
            width = (width + 2 * padding - layer.kernel) // layer.stride + 1
        self.stem = nn.Sequential(*convolutions)
        self.film = nn.Linear(config.word_width, 2 * channels)
        nn.init.zeros_(self.film.weight)
        nn.init.zeros_(self.film.bias)
        self.points = nn.Conv2d(channels, config.points, 1)
        across, down = torch.meshgrid(torch.linspace(-1, 1, width), torch.linspace(-1, 1, height), indexing="xy")
        self.register_buffer("places", torch.stack([across.flatten(), down.flatten()]), persistent=False)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """uint8[b, h, w, 3], float32[b, word_width] -> float32[b, 2 * points] in [-1, 1]"""
        # bfloat16 from the start where training uses it: converting the images is a tenth of the step otherwise
        device = images.device.type
        half = torch.is_autocast_enabled(device)
        pixels = images.permute(0, 3, 1, 2).to(torch.get_autocast_dtype(device) if half else torch.float32)
        features = self.stem(pixels * (1 / 127.5) - 1)
        scale, shift = self.film(words)[:, :, None, None].chunk(2, 1)
        heat = self.points(F.relu(features * (1 + scale) + shift)).float()
        # the features lie channel by channel, so this is a view and the soft-max runs along whole rows of points
        mass = heat.permute(0, 2, 3, 1).flatten(1, 2).softmax(1)
        return (self.places @ mass).flatten(1)


class SlowPath(nn.Module):
    """Images and words -> latent: every camera's feature points, then the mean of the word vectors."""

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocabulary, config.word_width, padding_idx=PADDING)
        self.encoders = nn.ModuleList(Encoder(eye, config) for eye in config.eyes)
        self.width = 2 * config.points * len(config.eyes) + config.word_width

    def forward(self, images: Sequence[torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        """one uint8[b, h, w, 3] per camera, int64[b, L] -> float32[b, z]"""
        count = (tokens != PADDING).sum(1, keepdim=True).clamp_min(1)
        words = self.words(tokens).sum(1) / count
        seen = [encoder(image, words) for encoder, image in zip(self.encoders, images, strict=True)]
        return torch.cat([*seen, words], 1)


class FastPath(nn.Module):
    """Latent, normalised state, noisy actions and flow time -> what `FlowConfig.predict` says.

    The first layer is split by input, so that in sampling all that does not change is computed once. Two of its parts
    are there only when the configuration asks for them: the age of what the latent was made from (a scalar beside the
    latent, as in TIC-VLA, arXiv 2602.02459), and which actions are committed.
    """

    frequency: torch.Tensor
    age_frequency: torch.Tensor

    def __init__(self, config: FlowConfig, latent_width: int) -> None:
        super().__init__()
        flat = config.horizon * config.action_dim
        inputs = [latent_width, config.state_dim, 2 * config.frequencies, flat]
        self.latent = nn.Linear(inputs[0], config.width)
        self.state = nn.Linear(inputs[1], config.width, bias=False)
        self.time = nn.Linear(inputs[2], config.width, bias=False)
        self.noisy = nn.Linear(inputs[3], config.width, bias=False)
        parts = [self.latent, self.state, self.time, self.noisy]
        self.max_age = config.max_offset + AGE_MARGIN
        if config.max_offset:
            self.age = nn.Linear(1 + 2 * AGE_FREQUENCIES, config.width, bias=False)
            parts.append(self.age)
            self.register_buffer("age_frequency", _frequencies(AGE_FREQUENCIES), persistent=False)
        if config.prefix:
            self.committed = nn.Linear(config.horizon, config.width, bias=False)
            parts.append(self.committed)
        # the parts of one layer: each starts as that layer would, by the sum of the inputs
        bound = 1 / math.sqrt(sum(part.in_features for part in parts))
        for part in parts:
            for parameter in part.parameters():
                nn.init.uniform_(parameter, -bound, bound)
        hidden: list[nn.Module] = [nn.SiLU()]
        for _ in range(config.layers - 1):
            hidden += [nn.Linear(config.width, config.width), nn.SiLU()]
        self.head = nn.Sequential(*hidden, nn.Linear(config.width, flat))
        self.register_buffer("frequency", _frequencies(config.frequencies), persistent=False)
        self._aged, self._prefixed = config.max_offset > 0, config.prefix

    def embed(self, time: torch.Tensor) -> torch.Tensor:
        """float32[..., 1] in [0, 1] -> float32[..., 2 * frequencies]"""
        angle = time * self.frequency
        return torch.cat([angle.sin(), angle.cos()], -1)

    def embed_age(self, age: torch.Tensor) -> torch.Tensor:
        """float32[..., 1] ticks -> float32[..., 1 + 2 * AGE_FREQUENCIES]; ages beyond training count as its oldest."""
        scaled = age.clamp(0, self.max_age) / self.max_age
        angle = scaled * self.age_frequency
        return torch.cat([scaled, angle.sin(), angle.cos()], -1)

    def with_options(
        self, fixed: torch.Tensor, age: torch.Tensor | None, committed: torch.Tensor | None
    ) -> torch.Tensor:
        """`fixed` [..., width] plus what [..., 1] `age` (default 0) and [..., H] `committed` (default none) say."""
        if self._aged:
            fixed = fixed + self.age(self.embed_age(fixed.new_zeros(1) if age is None else age))
        if self._prefixed and committed is not None:
            fixed = fixed + self.committed(committed)
        return fixed

    def forward(
        self,
        latent: torch.Tensor,
        state: torch.Tensor,
        noisy: torch.Tensor,
        time: torch.Tensor,
        age: torch.Tensor | None = None,
        committed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[b, z], [b, k, ds], [b, k, H * da], [b, k, 1], [b, k, 1], [b, k, H] -> [b, k, H * da]"""
        fixed = self.with_options(self.latent(latent)[:, None] + self.state(state), age, committed)
        return self.head(fixed + self.time(self.embed(time)) + self.noisy(noisy))


def _frequencies(count: int) -> torch.Tensor:
    return 2.0 ** torch.arange(count) * math.pi / 2


class FlowNetwork(nn.Module):
    """Both paths and the state's statistics. Actions are normalised to [-1, 1] on both sides."""

    image_losses: torch.Tensor | None = None
    """float32[b]: the flow loss behind each image of the last `loss`"""

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        self.config = config
        self.normalizer = Normalizer(config.state_dim)
        self.slow = SlowPath(config)
        self.fast = FastPath(config, self.slow.width)
        if config.ahead:
            inputs, outputs = self.slow.width + config.state_dim, len(config.ahead) * config.state_dim
            self.prophet = nn.Sequential(nn.Linear(inputs, 128), nn.SiLU(), nn.Linear(128, outputs))
        if config.residual:
            self.residual = Residual(config, self.slow.width)

    def loss(
        self,
        images: Sequence[torch.Tensor],
        tokens: torch.Tensor,
        state: torch.Tensor,
        actions: torch.Tensor,
        mask: torch.Tensor,
        ahead: torch.Tensor | None = None,
        age: torch.Tensor | None = None,
        later: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Conditional flow matching, the mean over the actions that `mask` keeps.

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

        With `config.residual` and `later`, the corrector's loss is added; see `Residual`. It moves nothing else.

        images: uint8[b, h, w, 3] per camera; tokens: int64[b, L]; state: [b, k, ds]; actions: [b, k, H, da];
        mask: bool[b, k, H]; ahead: [b, k, W, ds]; age: [b, k, 1] ticks, 0 when left out;
        later: state [b, k, ds] some ticks into the window, and int64[b, k], how many.
        """
        flow_mask, committed = mask, None
        kept = mask[..., None].expand_as(actions).flatten(2)
        # what is masked is no action: its values must reach neither the input nor the loss
        target = actions.flatten(2).where(kept, 0.0)
        noise = torch.randn_like(target)
        time = torch.rand_like(target[..., :1])
        noisy = (1 - time) * noise + time * target
        if self.config.prefix:
            known = self._draw_committed(mask)
            committed, flow_mask = known.float(), mask & ~known
            told = self._swap(target, known, mask)
            noisy = torch.where(known[..., None].expand_as(actions).flatten(2), told, noisy)
            kept = flow_mask[..., None].expand_as(actions).flatten(2)
        latent, felt = self.slow(images, tokens), self.normalizer(state)
        output = self.fast(latent, felt, noisy, time, age, committed).float()
        wanted = target if self.config.predict == "action" else target - noise
        errors = (output - wanted).square() * kept
        loss = errors.sum() / kept.sum()
        self.image_losses = (errors.detach().sum((1, 2)) / kept.sum((1, 2)).clamp_min(1)).float()
        if self.config.residual and later is not None:
            base = self._rough(latent, felt, age).unflatten(-1, actions.shape[2:])
            clean = target.unflatten(-1, actions.shape[2:])
            loss = loss + self.residual.loss(latent, self.normalizer(later[0]), later[1], base, clean, mask, age)
        if ahead is None or not self.config.ahead:
            return loss
        moved = (ahead - state[:, :, None]) / self.normalizer.std
        seen = torch.cat([latent[:, None].expand(-1, felt.shape[1], -1), felt], -1)
        foretold = self.prophet(seen).float().unflatten(-1, moved.shape[-2:])
        return loss + self.config.ahead_weight * (foretold - moved).square().mean()

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

    @torch.no_grad()
    def _rough(self, latent: torch.Tensor, felt: torch.Tensor, age: torch.Tensor | None) -> torch.Tensor:
        """[b, k, H * da] in [-1, 1]: what the policy would do, in fewer steps than `sample` takes."""
        actions = torch.randn(*felt.shape[:2], self.config.horizon * self.config.action_dim, device=felt.device)
        for step in range(ROUGH_STEPS):
            time = actions.new_full((*felt.shape[:2], 1), step / ROUGH_STEPS)
            output = self.fast(latent, felt, actions, time, age).float()
            if self.config.predict == "action":
                actions = torch.lerp(actions, output, 1 / (ROUGH_STEPS - step))
            else:
                actions = actions + output / ROUGH_STEPS
        return actions.clamp(-1, 1)

    def sample(
        self,
        latent: torch.Tensor,
        state: torch.Tensor,
        noise: torch.Tensor,
        age: torch.Tensor | None = None,
        known: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `sampling.sample`."""
        return sampling.sample(self, latent, state, noise, age, known)
