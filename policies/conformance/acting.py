"""Checks of what a policy does on a robot."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import numpy as np

from policies.common.residual_policy import correct
from policies.conformance.data import (
    Make,
    changed_images,
    changed_state,
    chunk_of,
    example_observation,
    looked_at,
    moved,
    random_state,
    refused,
    seeded,
    with_random_zero_init,
)
from policies.interface.policy import Batch, Policy
from wire.codec import decode, encode
from wire.errors import InvalidDataError, PolicyError, WireError
from wire.messages.local import ThinkReply
from wire.types import Frame, Observation, PolicyCapabilities, Prefix


def shapes(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
    policy = make()
    chunk = chunk_of(policy, observation)
    expected = (policy.horizon, policy.spec.action_dim)
    if chunk.actions.shape != expected or chunk.actions.dtype != np.float32:
        yield f"actions are {chunk.actions.dtype}{list(chunk.actions.shape)}, expected float32{list(expected)}"


def limits(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
    policy = make()
    spec = policy.spec
    latent = policy.think(observation)
    for seed in range(8):
        # far outside anything seen: limits must hold there too
        state = 100 * example_observation(spec, seed).state
        actions = policy.act(msgspec.structs.replace(observation, state=state), latent, 3).actions
        if not np.isfinite(actions).all():
            yield "actions that are not finite"
        if (actions < spec.action_low()).any() or (actions > spec.action_high()).any():
            yield f"actions from {actions.min(0)} to {actions.max(0)} leave the spec's limits"


def stamps(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
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
    yield "; ".join(wrong)


def determinism(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
    found = []
    for seed in range(2):
        with seeded(seed):
            policy = make()
            found.append([chunk_of(policy, observation).actions for _ in range(2)])
    if not all(np.array_equal(a, b) for a, b in zip(*found, strict=True)):
        yield "two policies of one seed act differently, or as torch's or numpy's global random stream is"


def random_streams(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
    with seeded(5):
        before = random_state()
        policy = make()
        if streams := moved(before):
            yield f"making a policy moves the global random stream of {streams}: whoever makes one must not notice"
        latent = policy.think(observation)
        if streams := moved(before):
            yield f"think() moves the global random stream of {streams}"
        policy.act(observation, latent, 0)
        with contextlib.suppress(PolicyError):
            policy.act(observation, latent, 0, Prefix(_decided(policy, 1), 1, guided=True))
        if streams := moved(before):
            yield f"act() moves the global random stream of {streams}"
        policy.load(policy.save(), policy.version + 1)
        if streams := moved(before):
            yield f"save() or load() moves the global random stream of {streams}"


def separation(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
    latent = make().think(observation)
    changed = msgspec.structs.replace(changed_images(observation), task="something else")
    first, second = make().act(observation, latent, 0), make().act(changed, latent, 0)
    if not np.array_equal(first.actions, second.actions):
        yield "act() gives other actions for another image or instruction behind the same latent"


def fresh_state(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
    make = with_random_zero_init(make)
    policy, other = make(), make()
    latent, changed = policy.think(observation), changed_state(policy.spec, observation)
    # A policy that draws may draw the same once; both have the same noise.
    pairs = [(policy.act(observation, latent, 0), other.act(changed, latent, 0)) for _ in range(4)]
    if all(np.array_equal(first.actions, second.actions) for first, second in pairs):
        yield "act() gives the same actions for another state behind the same latent: it must read the newest state"


def no_state_in_latent(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
    policy = make()
    if getattr(policy, "think_reads_state", False):
        return
    first = policy.think(observation).data
    second = make().think(changed_state(policy.spec, observation)).data
    if not np.array_equal(first, second):
        yield (
            "think() leaves another latent for another state, so the fast path gets an old one in it; read the state "
            "in act(), or say `think_reads_state = True`"
        )


def own_latent(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
    policy, other = make(), make()
    latent = policy.think(observation)
    expected = policy.act(observation, latent, 0).actions
    first = other.think(observation)
    later = msgspec.structs.replace(changed_images(observation), task="something else")
    other.think(msgspec.structs.replace(later, time_ns=later.time_ns + 10 * other.spec.period_ns))
    if not np.array_equal(expected, other.act(observation, first, 0).actions):
        yield "act() goes by what think() saw last, not by the latent it is given"


def travels(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
    policy = make()
    latent = policy.think(observation)
    expected = policy.act(observation, latent, 0).actions
    try:
        sent = decode(encode(ThinkReply(0, latent, (policy.version,))))
    except WireError as error:
        yield f"a latent that cannot be sent to another process: {error}"
    assert isinstance(sent, ThinkReply)
    assert sent.latent is not None
    if not np.array_equal(expected, make().act(observation, sent.latent, 0).actions):
        yield "another process that is sent the latent acts differently on it"


def age(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
    policy, other = make(), make()
    if policy.trained.trained_max_delay:
        return
    latent = policy.think(observation)
    older = msgspec.structs.replace(latent, observed_ns=latent.observed_ns - 10 * policy.spec.period_ns)
    if not np.array_equal(policy.act(observation, latent, 0).actions, other.act(observation, older, 0).actions):
        yield "a policy that was trained for no delay acts differently when the latent is older"


def prefix(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
    for guided in (False, True):
        policy = make()
        actions = _decided(policy, max(1, policy.horizon // 2))
        committed = (len(actions) + 1) // 2
        latent = policy.think(observation)
        try:
            chunk = policy.act(observation, latent, 0, Prefix(actions, committed, guided))
        except PolicyError as error:
            if policy.trained.prefix_trained and not guided:
                yield f"trained with prefixes, but act() refuses one: {error}"
            continue
        if not np.array_equal(chunk.actions[:committed], actions[:committed]):
            yield f"a chunk that does not begin with the {committed} committed actions (guided: {guided})"


def behind_prefix(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
    make = with_random_zero_init(make)
    policy, other = make(), make()
    if not policy.trained.prefix_trained or policy.horizon < 2:
        return
    spec, committed = policy.spec, policy.horizon // 2
    decided = _decided(policy, committed)
    opposite = spec.action_low() + spec.action_high() - decided
    latent = policy.think(observation)
    first = policy.act(observation, latent, 0, Prefix(decided, committed)).actions
    second = other.act(observation, latent, 0, Prefix(opposite, committed)).actions
    if np.array_equal(first[committed:], second[committed:]):
        yield (
            "trained with prefixes, but the rest of a chunk is the same whatever was committed: the network must read "
            "the committed actions, copying them into its answer leaves a jump behind them"
        )


def bad_prefix(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
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
            given = Prefix(actions, committed, guided)
            act = partial(policy.act, observation, latent, 0, given)
            yield refused(f"act() on a prefix {name} (guided: {guided})", act, PolicyError)


def refusals(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
    policy = make()
    latent = policy.think(observation)
    state = observation.state

    def act(value: np.ndarray) -> Callable[[], object]:
        return partial(policy.act, msgspec.structs.replace(observation, state=value), latent, 0)

    def think(images: dict[str, Frame]) -> Callable[[], object]:
        return partial(policy.think, msgspec.structs.replace(observation, images=images))

    cases = [("act() on a state with NaN", act(np.full_like(state, np.nan)))]
    cases.append((f"act() on {len(state) + 1} state dimensions", act(np.append(state, state[:1]))))
    for name in looked_at(make, observation):
        frame = observation.images[name]
        small = msgspec.structs.replace(frame, image=frame.image[:-1])
        rest = {other: kept for other, kept in observation.images.items() if other != name}
        cases.append((f"think() without camera '{name}'", think(rest)))
        cases.append((f"think() on an image of '{name}' that is a row too low", think({**rest, name: small})))
    for what, call in cases:
        yield refused(what, call, InvalidDataError)


def training(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
    policy = make()
    trained, corrector, spec = policy.trained, policy.corrector, policy.spec
    if not isinstance(trained, PolicyCapabilities):
        yield f"`trained` is {trained!r}, not a `PolicyCapabilities`"
    if policy.max_offset != trained.trained_max_delay:
        yield f"max_offset is {policy.max_offset}, but weights say trained_max_delay {trained.trained_max_delay}"
    if trained.residual_trained != (corrector is not None):
        yield f"residual_trained is {trained.residual_trained}, but the corrector is {type(corrector).__name__}"
    if corrector is None:
        return
    if corrector.version != policy.version:
        yield f"the corrector is of version {corrector.version}, the policy of version {policy.version}"
    latent = policy.think(observation).data
    low, high = spec.action_low(), spec.action_high()
    action = correct(corrector, observation.state, latent, _decided(policy, 1)[0], low, high, policy.horizon - 1, 3.0)
    fits = action.shape == low.shape and bool(((action >= low) & (action <= high)).all())
    if not fits:
        yield f"the corrector gives {action}, outside the spec's limits"


def unchanged(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
    policy = make()
    before = policy.save()
    for _ in range(2):
        chunk_of(policy, observation)
    if policy.save() != before:
        yield "its weights are others after it acted"


def _decided(policy: Policy, count: int) -> np.ndarray:
    shape = (count, policy.spec.action_dim)
    drawn = np.random.default_rng(0).uniform(policy.spec.action_low(), policy.spec.action_high(), shape)
    return np.clip(drawn.astype(np.float32), policy.spec.action_low(), policy.spec.action_high())
