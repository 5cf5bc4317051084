"""What the conformance suite shows a policy: observations, batches, and small tools that its checks share."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from policies.interface.policy import Batch, LearnedPolicy, Policy
from wire.types import ActionChunk, Frame, Observation, RobotSpec

Make = Callable[[], LearnedPolicy]


def example_observation(spec: RobotSpec, seed: int = 0, task: str = "open the drawer") -> Observation:
    """A random observation that fits `spec`: states within the limits (or ±1 where there are none), noise images."""
    rng = np.random.default_rng(seed)
    low, high = np.array([d.low for d in spec.state]), np.array([d.high for d in spec.state])
    bounded = np.isfinite(low) & np.isfinite(high)
    state = rng.uniform(np.where(bounded, low, -1), np.where(bounded, high, 1)).astype(np.float32)
    images = {
        camera.name: Frame(900 + i, rng.integers(0, 256, (camera.height, camera.width, 3), np.uint8))
        for i, camera in enumerate(spec.cameras)
    }
    return Observation(1000, state, images, task)


def example_batch(
    spec: RobotSpec,
    horizon: int,
    seed: int = 0,
    images: int = 4,
    steps: int = 2,
    ticks_ahead: tuple[int, ...] = (),
    history: int = 0,
) -> Batch:
    """A random grouped training batch: `steps` steps behind each of `images` images, every action kept."""
    rng = np.random.default_rng(seed)
    seen = [example_observation(spec, seed + 1 + i) for i in range(images)]
    state = np.stack([o.state for o in seen])[:, None].repeat(steps, 1)
    batch: Batch = {
        "images": {c.name: np.stack([o.images[c.name].image for o in seen]) for c in spec.cameras},
        "state": state + rng.normal(0, 0.01, state.shape).astype(np.float32),
        "actions": rng.uniform(spec.action_low(), spec.action_high(), (images, steps, horizon, spec.action_dim)).astype(
            np.float32
        ),
        "mask": np.ones((images, steps, horizon), bool),
        "ahead": rng.normal(0, 0.1, (images, steps, len(ticks_ahead), spec.state_dim)).astype(np.float32),
        "seen_state": state[:, 0],
        "frame_age": rng.uniform(0, 3, (images, steps)).astype(np.float32),
        "later_state": state + rng.normal(0, 0.1, state.shape).astype(np.float32),
        "later_index": rng.integers(0, horizon, (images, steps)),
        "instructions": ["open the drawer", "press the button"] * (images // 2) + ["open it"] * (images % 2),
    }
    if history:
        batch["past_state"] = batch["state"][:, :, None].repeat(history, 2)
        batch["past_images"] = {name: frames[:, None].repeat(history, 1) for name, frames in batch["images"].items()}
    return batch


def flattened(batch: Batch) -> tuple[Batch, Batch]:
    """The first step behind each image of a grouped batch, once with the axis of the steps and once without."""
    axes = np.shape(batch["state"])[:2]
    grouped, flat = dict(batch), dict(batch)
    for name, values in batch.items():
        if isinstance(values, np.ndarray) and values.shape[:2] == axes and name not in ("images", "seen_state"):
            grouped[name], flat[name] = values[:, :1], values[:, 0]
    return grouped, flat


def changed_images(observation: Observation, cameras: set[str] | None = None) -> Observation:
    """Every image, or those of `cameras`, as its negative."""
    images = {
        name: msgspec.structs.replace(frame, image=255 - frame.image) if cameras is None or name in cameras else frame
        for name, frame in observation.images.items()
    }
    return msgspec.structs.replace(observation, images=images)


def changed_state(spec: RobotSpec, observation: Observation) -> Observation:
    """Another state within the limits."""
    return msgspec.structs.replace(observation, state=example_observation(spec, 77).state)


def looked_at(make: Make, observation: Observation) -> list[str]:
    """Names of the cameras whose image changes what `think` leaves."""
    latent = make().think(observation).data
    return [
        name
        for name in observation.images
        if not np.array_equal(latent, make().think(changed_images(observation, {name})).data)
    ]


def chunk_of(policy: Policy, observation: Observation, tick: int = 3) -> ActionChunk:
    """think, then act."""
    return policy.act(observation, policy.think(observation), tick)


def refused(what: str, call: Callable[[], object], *errors: type[Exception]) -> str:
    """'' if `call` raises one of `errors`, otherwise what it did instead; `what` names it and what it was given."""
    try:
        call()
    except errors:
        return ""
    except Exception as error:  # noqa: BLE001  any other error is the fault that is looked for
        return f"{what} must raise {errors[-1].__name__}, not {type(error).__name__}: {error}"
    return f"{what} must raise {errors[-1].__name__}, and was taken"


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The global random streams of torch, numpy and Python begin at `seed` inside, and go on as before after it."""
    import torch

    before = random_state()
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before["torch"])
        np.random.set_state(before["numpy"])
        random.setstate(before["random"])


def random_state() -> dict[str, Any]:
    """Where the global random streams are, by the name of the library."""
    import torch

    return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}


def moved(before: dict[str, Any]) -> list[str]:
    """Libraries whose global random stream is no longer where it was."""
    now = random_state()
    return [name for name in before if not _same(before[name], now[name])]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(np.all(np.asarray(one) == np.asarray(other)))


def randomize_zero_init(policy: LearnedPolicy) -> bool:
    """Give every trained tensor that is all zero small random values; whether there was one.

    Last layers and adapters often begin with zeros, and until the first gradient step nothing behind them shows.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    found = False
    with torch.no_grad():
        for parameter in policy.module.parameters():
            if parameter.requires_grad and not bool(parameter.any()):
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
                found = True
    return found


def with_random_zero_init(make: Make) -> Make:
    """`make` of policies whose zeros are not; as it is for those without zeros."""
    policy = make()
    if not randomize_zero_init(policy):
        return make
    weights = policy.save()

    def other() -> LearnedPolicy:
        fresh = make()
        fresh.load(weights, fresh.version + 1)
        return fresh

    return other
