"""What every policy must do: run it on your own before you give it to a robot.

    for check in check_policy(lambda: MyPolicy(spec, seed=0)):
        print(check.name, "ok" if check.passed else check.detail)

`make` returns a fresh policy with the same first weights and the same random seed every time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np

from policies.base import Batch, Policy, TrainablePolicy
from policies.corrector import correct
from wire.errors import PolicyError, WeightsError
from wire.types import ActionChunk, Frame, Observation, Prefix, RobotSpec, Trained


class BothPolicies(Policy, TrainablePolicy, Protocol):
    """A policy that can run and learn."""


Make = Callable[[], BothPolicies]


@dataclass(frozen=True)
class Check:
    """One promise and whether the policy kept it."""

    name: str
    passed: bool
    detail: str = ""
    """what was seen instead, '' when it passed"""


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
    spec: RobotSpec, horizon: int, seed: int = 0, images: int = 4, steps: int = 2, ticks_ahead: tuple[int, ...] = ()
) -> Batch:
    """A random grouped training batch: `steps` steps behind each of `images` images, every action kept."""
    rng = np.random.default_rng(seed)
    seen = [example_observation(spec, seed + 1 + i) for i in range(images)]
    state = np.stack([o.state for o in seen])[:, None].repeat(steps, 1)
    return {
        "images": {c.name: np.stack([o.images[c.name].image for o in seen]) for c in spec.cameras},
        "state": state + rng.normal(0, 0.01, state.shape).astype(np.float32),
        "actions": rng.uniform(spec.action_low(), spec.action_high(), (images, steps, horizon, spec.action_dim)).astype(
            np.float32
        ),
        "mask": np.ones((images, steps, horizon), bool),
        "ahead": rng.normal(0, 0.1, (images, steps, len(ticks_ahead), spec.state_dim)).astype(np.float32),
        "frame_age": rng.uniform(0, 3, (images, steps)).astype(np.float32),
        "later_state": state + rng.normal(0, 0.1, state.shape).astype(np.float32),
        "later_index": rng.integers(0, horizon, (images, steps)),
        "instructions": ["open the drawer", "press the button"] * (images // 2) + ["open it"] * (images % 2),
    }


def check_policy(make: Make, observation: Observation | None = None, batch: Batch | None = None) -> list[Check]:
    """Run every check on policies from `make`; both inputs default to examples for its spec.

    What a policy raises becomes the detail of the check that failed.
    """
    results = []
    for name, check in _CHECKS.items():
        try:
            policy = make()
            seen = example_observation(policy.spec) if observation is None else observation
            data = batch
            if data is None:
                data = example_batch(policy.spec, policy.horizon, ticks_ahead=policy.ticks_ahead)
            detail = check(make, seen, data)
        except Exception as error:  # noqa: BLE001  a policy under test may raise anything; it is reported, not hidden
            detail = f"{type(error).__name__}: {error}"
        results.append(Check(name, not detail, detail))
    return results


def _chunk(policy: Policy, observation: Observation, tick: int = 3) -> ActionChunk:
    return policy.act(observation, policy.think(observation), tick)


def _shapes(make: Make, observation: Observation, batch: Batch) -> str:
    policy = make()
    chunk = _chunk(policy, observation)
    expected = (policy.horizon, policy.spec.action_dim)
    if chunk.actions.shape != expected or chunk.actions.dtype != np.float32:
        return f"actions are {chunk.actions.dtype}{list(chunk.actions.shape)}, expected float32{list(expected)}"
    return ""


def _limits(make: Make, observation: Observation, batch: Batch) -> str:
    policy = make()
    spec = policy.spec
    for seed in range(8):
        # far outside anything seen: limits must hold there too
        state = 100 * example_observation(spec, seed).state
        actions = _chunk(policy, msgspec.structs.replace(observation, state=state)).actions
        if not np.isfinite(actions).all():
            return "actions that are not finite"
        if (actions < spec.action_low()).any() or (actions > spec.action_high()).any():
            return f"actions from {actions.min(0)} to {actions.max(0)} leave the spec's limits"
    return ""


def _stamps(make: Make, observation: Observation, batch: Batch) -> str:
    policy = make()
    latent = policy.think(observation)
    chunk = policy.act(observation, latent, 7)
    wanted = {
        "first_tick": 7,
        "step_ns": policy.spec.period_ns,
        "version": policy.version,
        "observed_ns": observation.time_ns,
        "latent_observed_ns": latent.observed_ns,
    }
    wrong = [f"{name} {getattr(chunk, name)} instead of {v}" for name, v in wanted.items() if getattr(chunk, name) != v]
    return "; ".join(wrong)


def _determinism(make: Make, observation: Observation, batch: Batch) -> str:
    first, second = ([_chunk(policy, observation).actions for _ in range(2)] for policy in (make(), make()))
    same = all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    return "" if same else "two policies of one seed act differently"


def _separation(make: Make, observation: Observation, batch: Batch) -> str:
    latent = make().think(observation)
    other = {n: msgspec.structs.replace(f, image=255 - f.image) for n, f in observation.images.items()}
    changed = msgspec.structs.replace(observation, images=other, task="something else")
    first, second = make().act(observation, latent, 0), make().act(changed, latent, 0)
    same = np.array_equal(first.actions, second.actions)
    return "" if same else "act() gives other actions for another image or instruction behind the same latent"


def _age(make: Make, observation: Observation, batch: Batch) -> str:
    policy, other = make(), make()
    if policy.trained.trained_max_delay:
        return ""
    latent = policy.think(observation)
    older = msgspec.structs.replace(latent, observed_ns=latent.observed_ns - 10 * policy.spec.period_ns)
    same = np.array_equal(policy.act(observation, latent, 0).actions, other.act(observation, older, 0).actions)
    return "" if same else "a policy that was trained for no delay acts differently when the latent is older"


def _prefix(make: Make, observation: Observation, batch: Batch) -> str:
    for guided in (False, True):
        policy = make()
        actions = _decided(policy, max(1, policy.horizon // 2))
        committed = (len(actions) + 1) // 2
        latent = policy.think(observation)
        try:
            chunk = policy.act(observation, latent, 0, Prefix(actions, committed, guided))
        except PolicyError as error:
            if policy.trained.prefix_trained and not guided:
                return f"trained with prefixes, but act() refuses one: {error}"
            continue
        if not np.array_equal(chunk.actions[:committed], actions[:committed]):
            return f"a chunk that does not begin with the {committed} committed actions (guided: {guided})"
    return ""


def _bad_prefix(make: Make, observation: Observation, batch: Batch) -> str:
    policy = make()
    latent = policy.think(observation)
    good = _decided(policy, 1)
    for name, actions, committed in (
        ("longer than the chunk", _decided(policy, policy.horizon + 1), 1),
        ("of another width", np.hstack([good, good]), 1),
        ("with NaN", np.full_like(good, np.nan), 1),
        ("with more committed than it has", good, 2),
    ):
        for guided in (False, True):
            try:
                policy.act(observation, latent, 0, Prefix(actions, committed, guided))
            except PolicyError:
                continue
            return f"act() took a prefix {name} (guided: {guided})"
    return ""


def _decided(policy: Policy, count: int) -> np.ndarray:
    shape = (count, policy.spec.action_dim)
    drawn = np.random.default_rng(0).uniform(policy.spec.action_low(), policy.spec.action_high(), shape)
    return np.clip(drawn.astype(np.float32), policy.spec.action_low(), policy.spec.action_high())


def _training(make: Make, observation: Observation, batch: Batch) -> str:
    policy = make()
    trained, corrector, spec = policy.trained, policy.corrector, policy.spec
    if not isinstance(trained, Trained):
        return f"`trained` is {trained!r}, not a `Trained`"
    if policy.max_offset != trained.trained_max_delay:
        return f"max_offset is {policy.max_offset}, but weights say trained_max_delay {trained.trained_max_delay}"
    if trained.residual_trained != (corrector is not None):
        return f"residual_trained is {trained.residual_trained}, but the corrector is {type(corrector).__name__}"
    if corrector is None:
        return ""
    if corrector.version != policy.version:
        return f"the corrector is of version {corrector.version}, the policy of version {policy.version}"
    latent = policy.think(observation).data
    low, high = spec.action_low(), spec.action_high()
    action = correct(corrector, observation.state, latent, _decided(policy, 1)[0], low, high, policy.horizon - 1, 3.0)
    fits = action.shape == low.shape and bool(((action >= low) & (action <= high)).all())
    return "" if fits else f"the corrector gives {action}, outside the spec's limits"


def _versions(make: Make, observation: Observation, batch: Batch) -> str:
    policy = make()
    latent = policy.think(observation)
    policy.load(policy.save(), policy.version + 1)
    try:
        policy.act(observation, latent, 0)
    except PolicyError:
        return ""
    return "act() took a latent of an earlier version"


def _round_trip(make: Make, observation: Observation, batch: Batch) -> str:
    policy, other = make(), make()
    saved = policy.save()
    other.load(saved, 5)
    if other.version != 5:
        return f"version is {other.version} after loading version 5"
    if other.save() != saved:
        return "weights change when they are loaded and saved again"
    same = np.array_equal(_chunk(policy, observation).actions, _chunk(other, observation).actions)
    return "" if same else "a policy acts differently after its own weights were loaded"


def _garbage(make: Make, observation: Observation, batch: Batch) -> str:
    policy = make()
    good = policy.save()
    version = policy.version
    for name, bad in (
        ("nothing", b""),
        ("noise", bytes(range(256)) * 8),
        ("a torn file", good[: len(good) // 2]),
        ("a pickle", b"\x80\x04N."),
        ("a torch archive", b"PK\x03\x04" + good),
    ):
        try:
            policy.load(bad, version + 1)
        except WeightsError:
            pass
        else:
            return f"load() took {name}"
        if policy.version != version or policy.save() != good:
            return f"load() of {name} changed the policy"
    return ""


def _gradient(make: Make, observation: Observation, batch: Batch) -> str:
    policy = make()
    loss: Any = policy.loss(batch)
    if loss.ndim != 0 or not np.isfinite(loss.item()):
        return f"the loss is {loss}, not one finite number"
    loss.backward()
    without = [
        name
        for name, parameter in policy.module.named_parameters()
        if parameter.requires_grad and (parameter.grad is None or not bool(parameter.grad.any()))
    ]
    return f"no gradient reaches {without}" if without else ""


_CHECKS: dict[str, Callable[[Make, Observation, Batch], str]] = {
    "a chunk has H actions of the spec's width": _shapes,
    "actions are finite and within the spec's limits": _limits,
    "a chunk carries its tick, times and version": _stamps,
    "the same seed gives the same actions": _determinism,
    "act reads no image": _separation,
    "the latent's age matters only to a policy trained for delays": _age,
    "a chunk begins with what is committed": _prefix,
    "a prefix that does not fit is refused": _bad_prefix,
    "it says what it was trained for": _training,
    "a latent of another version is refused": _versions,
    "saving and loading changes nothing": _round_trip,
    "garbage is refused and the old weights stay": _garbage,
    "a gradient reaches every trainable tensor": _gradient,
}
