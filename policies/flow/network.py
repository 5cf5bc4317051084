"""The network of the flow policy: a slow path from images and words to a latent, a fast path from there to actions.

Shapes: b images, k steps behind each image, z latent, ds state, H actions of da numbers, L words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import torch
import torch.nn.functional as F
from torch import nn

from policies.normalizer import Normalizer
from policies.text import PADDING


class Eye(msgspec.Struct, frozen=True):
    """The camera an encoder looks through."""

    name: str
    height: int
    width: int


class Conv(msgspec.Struct, frozen=True):
    """One convolution, padded so that the stride alone shrinks the image."""

    channels: int
    kernel: int
    stride: int


class FlowConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that decides the network's shape and how it is sampled. It travels with the weights."""

    state_dim: int
    action_dim: int
    horizon: int = 16
    """H"""
    eyes: tuple[Eye, ...] = ()
    """empty: the slow path reads only the instruction"""
    stem: tuple[Conv, ...] = (Conv(32, 5, 2), Conv(48, 3, 2), Conv(48, 3, 1))
    """convolutions of each camera's encoder"""
    points: int = 32
    """feature points per camera; each gives an x and a y to the latent"""
    vocabulary: int = 256
    """word ids, with the padding id"""
    words: int = 16
    """L, words read of an instruction"""
    word_width: int = 32
    width: int = 256
    """hidden units of the fast path"""
    layers: int = 3
    """hidden layers of the fast path"""
    frequencies: int = 8
    """sines and cosines of the flow time"""
    ahead: tuple[int, ...] = ()
    """ticks at which an auxiliary head predicts the state, while it trains; see `FlowNetwork.loss`"""
    ahead_weight: float = 0.3
    """its share in the loss"""
    predict: Literal["velocity", "action"] = "velocity"
    """what the fast path's output means; see `FlowNetwork.loss`"""
    euler_steps: int = 5
    """integration steps from noise to actions"""


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

    The first layer is split by input, so that in sampling all that does not change is computed once.
    """

    frequency: torch.Tensor

    def __init__(self, config: FlowConfig, latent_width: int) -> None:
        super().__init__()
        flat = config.horizon * config.action_dim
        inputs = (latent_width, config.state_dim, 2 * config.frequencies, flat)
        self.latent = nn.Linear(inputs[0], config.width)
        self.state = nn.Linear(inputs[1], config.width, bias=False)
        self.time = nn.Linear(inputs[2], config.width, bias=False)
        self.noisy = nn.Linear(inputs[3], config.width, bias=False)
        # four parts of one layer: each starts as that layer would, by the sum of the inputs
        bound = 1 / math.sqrt(sum(inputs))
        for part in (self.latent, self.state, self.time, self.noisy):
            for parameter in part.parameters():
                nn.init.uniform_(parameter, -bound, bound)
        hidden: list[nn.Module] = [nn.SiLU()]
        for _ in range(config.layers - 1):
            hidden += [nn.Linear(config.width, config.width), nn.SiLU()]
        self.head = nn.Sequential(*hidden, nn.Linear(config.width, flat))
        frequency = 2.0 ** torch.arange(config.frequencies) * math.pi / 2
        self.register_buffer("frequency", frequency, persistent=False)

    def embed(self, time: torch.Tensor) -> torch.Tensor:
        """float32[..., 1] in [0, 1] -> float32[..., 2 * frequencies]"""
        angle = time * self.frequency
        return torch.cat([angle.sin(), angle.cos()], -1)

    def forward(
        self, latent: torch.Tensor, state: torch.Tensor, noisy: torch.Tensor, time: torch.Tensor
    ) -> torch.Tensor:
        """[b, z], [b, k, ds], [b, k, H * da], [b, k, 1] -> [b, k, H * da]"""
        fixed = self.latent(latent)[:, None] + self.state(state)
        return self.head(fixed + self.time(self.embed(time)) + self.noisy(noisy))


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

    def loss(
        self,
        images: Sequence[torch.Tensor],
        tokens: torch.Tensor,
        state: torch.Tensor,
        actions: torch.Tensor,
        mask: torch.Tensor,
        ahead: torch.Tensor | None = None,
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

        images: uint8[b, h, w, 3] per camera; tokens: int64[b, L]; state: [b, k, ds]; actions: [b, k, H, da];
        mask: bool[b, k, H]; ahead: [b, k, W, ds].
        """
        kept = mask[..., None].expand_as(actions).flatten(2)
        # what is masked is no action: its values must reach neither the input nor the loss
        target = actions.flatten(2).where(kept, 0.0)
        noise = torch.randn_like(target)
        time = torch.rand_like(target[..., :1])
        noisy = (1 - time) * noise + time * target
        latent, felt = self.slow(images, tokens), self.normalizer(state)
        output = self.fast(latent, felt, noisy, time).float()
        wanted = target if self.config.predict == "action" else target - noise
        errors = (output - wanted).square() * kept
        loss = errors.sum() / kept.sum()
        self.image_losses = (errors.detach().sum((1, 2)) / kept.sum((1, 2)).clamp_min(1)).float()
        if ahead is None or not self.config.ahead:
            return loss
        moved = (ahead - state[:, :, None]) / self.normalizer.std
        seen = torch.cat([latent[:, None].expand(-1, felt.shape[1], -1), felt], -1)
        foretold = self.prophet(seen).float().unflatten(-1, moved.shape[-2:])
        return loss + self.config.ahead_weight * (foretold - moved).square().mean()

    def sample(self, latent: torch.Tensor, state: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Euler steps from noise to actions: [1, z], [1, ds], [1, H * da] -> [1, H * da] in [-1, 1]."""
        fast, steps = self.fast, self.config.euler_steps
        time = torch.arange(steps, device=noise.device)[:, None] / steps
        fixed = fast.latent(latent) + fast.state(self.normalizer(state)) + fast.time(fast.embed(time))
        weight = fast.noisy.weight.t()
        actions = noise
        for step in range(steps):
            output = fast.head(torch.addmm(fixed[step : step + 1], actions, weight))
            if self.config.predict == "action":
                # v = (a - x) / (1 - t), times the step 1 / steps
                actions = torch.lerp(actions, output, 1 / (steps - step))
            else:
                actions = actions + output / steps
        return actions.clamp(-1, 1)
