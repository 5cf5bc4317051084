"""What an older look costs a vision-language-action policy that was never trained for it, and what it saves.

    python -m benchmarks.prefix_age [--quick] [--json FILE] [--write]

A stock SmolVLA computes images, words and state anew for each chunk. Divided (see
`policies.lerobot.partitions.vla`), it acts on keys and values of images and words that may be older than its state.
A tiny one is trained as lerobot trains it, on a scripted operator who goes to a green square that stands still, or
follows one that circles; only the camera shows where it is. Then its chunks are made with everything but the age of
what they are made from being equal:

- `old state too`: the whole chunk from the old moment, the actions whose time has passed left out.
- `fresh state`: the prefix from the old moment, the state of now. What think and act do here.
- `fresh state, ages trained`: the same, by a network that was trained as long on images up to 24 ticks older than state
  and actions (`max_offset`; VLASH, arXiv 2512.01031).

Age 0 is the policy as lerobot runs it. An error is that of the actions that would be executed, against what the
operator wants in the same state; on target is the share of ticks within 3 cm of the square, after time to get there.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.common.pool import process_pool
from benchmarks.common.table import Goal, Result, interval, require, run
from benchmarks.prefix_age.scene import INSTRUCTIONS, MOVING, NEAR_M, SPEC, STILL, Demonstrations, Square, demonstrate

if TYPE_CHECKING:
    from policies.interface.policy import NormalizationData
    from policies.lerobot.tiny import TinySize as NetworkSize

HELD_OUT = 1_000_000
EXECUTE = 4
"""actions executed of each chunk"""
OLD, FRESH, TRAINED = "old state too", "fresh state", "fresh state, ages trained"
LEARNED = {OLD: "stock", FRESH: "stock", TRAINED: "aged"}
"""which network each way uses"""
CHANGES = {"expert_width_multiplier": 1.0, "max_action_dim": SPEC.action_dim, "max_state_dim": SPEC.state_dim}
"""of lerobot's configuration, so that a few hundred gradient steps are enough"""
SCENES = {STILL: "square stands still", MOVING: "square circles"}


@dataclass(frozen=True, slots=True)
class PrefixAgeSize:
    """How much of everything."""

    seeds: tuple[int, ...] = (0, 1)
    ages: tuple[int, ...] = (0, 2, 4, 8, 16, 24)
    demonstrations: int = 120
    """episodes of each scene"""
    demonstrated: int = 64
    """ticks of each"""
    ticks: int = 100
    """of an episode of the policy"""
    gradient_steps: int = 1500
    batch: int = 32
    samples: int = 96
    """moments of held-out demonstrations, for the error"""
    episodes: int = 12
    """for each age, way and scene"""
    settle: int = 50
    acts: int = 40
    """measured for their time"""

    @property
    def horizon(self) -> int:
        return max(self.ages) + EXECUTE

    @property
    def network(self) -> NetworkSize:
        from policies.lerobot.tiny import TinySize as NetworkSize

        return NetworkSize(hidden=64, layers=2, vision_hidden=64, vision_layers=1, patch_px=32, scale=1)


FULL = PrefixAgeSize()
QUICK = PrefixAgeSize((0,), (0, 4), 2, 40, 40, 4, 4, 8, 2, 10, 3)


class Model:
    """A tiny SmolVLA with its processors, many observations at once."""

    def __init__(self, directory: Path) -> None:
        from policies.lerobot.checkpoint import LeRobotCheckpoint
        from policies.lerobot.partitions.vla import SmolVLAPartition

        checkpoint = LeRobotCheckpoint.open(str(directory))
        self.policy = checkpoint.policy()
        self.before, self.after = checkpoint.processors()
        self.partition = SmolVLAPartition()

    def ready(
        self, images: np.ndarray, states: np.ndarray, words: list[str], chunks: np.ndarray | None = None
    ) -> dict[str, Any]:
        """`images` uint8[b, h, w, 3], `states` float32[b, ds] and what is to be learned as the network takes them."""
        import torch

        pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
        raw = {"observation.images.front": pixels, "observation.state": torch.from_numpy(states), "task": words}
        if chunks is not None:
            raw["action"] = torch.from_numpy(chunks)
        batch = dict(self.before(raw))
        if chunks is not None:
            batch["action_is_pad"] = torch.zeros(chunks.shape[:2], dtype=torch.bool)
        return batch

    def chunks(self, images: np.ndarray, states: np.ndarray, words: list[str], seed: int) -> np.ndarray:
        """float32[b, H, da], by think and act."""
        import torch

        noise = torch.randn(
            (len(states), *self.partition.noise_shape(self.policy)[1:]), generator=torch.Generator().manual_seed(seed)
        )
        with torch.no_grad():
            batch = self.ready(images, states, words)
            latent = self.partition.think(self.policy, batch)
            actions = self.partition.act(self.policy, latent, batch, noise, None)
        made: np.ndarray = self.after(actions).numpy()
        return np.clip(made, SPEC.action_low(), SPEC.action_high())


def train(directory: Path, size: PrefixAgeSize, demonstrations: Demonstrations, seed: int, max_age: int) -> Model:
    """A tiny SmolVLA after `size.gradient_steps` of AdamW; each image is 0 to `max_age` ticks older than its state."""
    import torch

    from policies.interface.policy import NormalizationData

    horizon, width = size.horizon, SPEC.action_dim
    whole = demonstrations.actions[:, : size.demonstrated // horizon * horizon].reshape(-1, horizon, width)
    examples = NormalizationData(demonstrations.states.reshape(-1, SPEC.state_dim), whole)
    _build(directory, size, seed, examples)
    model = Model(directory)
    unreached = model.partition.unreached(model.policy)
    learned = [parameter for name, parameter in model.policy.named_parameters() if name not in unreached]
    optimizer = torch.optim.AdamW(learned, lr=3e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, size.gradient_steps, pct_start=0.1)
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    model.policy.train()
    for _ in range(size.gradient_steps):
        ages = rng.integers(max_age + 1, size=size.batch)
        images, _, states, chunks, said = demonstrations.windows(rng, size.batch, horizon, ages)
        batch = model.ready(images, states, said, chunks)
        model.partition.loss(model.policy, model.partition.arrange(model.policy, batch)).backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.policy.eval()
    return model


def error(model: Model, way: str, age: int, held_out: Demonstrations, size: PrefixAgeSize, task: str) -> float:
    """Mean absolute error of the executed actions, in shares of their range."""
    rng = np.random.default_rng(7)
    chosen = [i for i, words in enumerate(held_out.instructions) if words == INSTRUCTIONS[task]]
    part = Demonstrations(
        held_out.images[chosen], held_out.states[chosen], held_out.actions[chosen], (INSTRUCTIONS[task],) * len(chosen)
    )
    # the same moments of acting at every age, so look back from there
    last = size.demonstrated - EXECUTE
    episode, now = rng.integers(len(chosen), size=size.samples), rng.integers(max(size.ages), last, size=size.samples)
    begin = age if way == OLD else 0
    states = part.states[episode, now - begin]
    chunks = model.chunks(part.images[episode, now - age], states, [INSTRUCTIONS[task]] * size.samples, seed=3)
    wanted = part.actions[episode[:, None], now[:, None] + np.arange(EXECUTE)]
    span = SPEC.action_high() - SPEC.action_low()
    return float(np.mean(np.abs(chunks[:, begin : begin + EXECUTE] - wanted) / span))


def on_target(model: Model, way: str, age: int, size: PrefixAgeSize, task: str) -> float:
    """Share of the ticks after `size.settle` within `NEAR_M` of the square, over all episodes."""
    robots = [Square() for _ in range(size.episodes)]
    for number, robot in enumerate(robots):
        robot.reset(task, HELD_OUT + number)
    begin = age if way == OLD else 0
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    near = []
    chunks = np.zeros((size.episodes, size.horizon, SPEC.action_dim), np.float32)
    for tick in range(size.ticks):
        views = [robot.read() for robot in robots]
        seen.append((np.stack([v.images["front"].image for v in views]), np.stack([v.state for v in views])))
        if tick % EXECUTE == 0:
            then = max(0, tick - age)
            # before the first look is old enough there is only that one
            begin = tick - then if way == OLD else 0
            states = seen[then if way == OLD else tick][1]
            chunks = model.chunks(seen[then][0], states, [INSTRUCTIONS[task]] * size.episodes, seed=tick)
        for robot, chunk in zip(robots, chunks, strict=True):
            robot.write(chunk[begin + tick % EXECUTE])
        if tick >= size.settle:
            near.append([robot.distance_m() < NEAR_M for robot in robots])
    return float(np.mean(near))


def times(directory: Path, acts: int) -> dict[str, float]:
    """Median milliseconds of think, act and the undivided prediction, each from observation to actions."""
    import torch

    from policies.lerobot.checkpoint import LeRobotCheckpoint
    from policies.lerobot.policy import LeRobotPolicy

    policy = LeRobotPolicy(SPEC, LeRobotCheckpoint.open(str(directory)))
    model = Model(directory)
    robot = Square()
    robot.reset(STILL, HELD_OUT)
    observation = robot.read()
    image, state = observation.images["front"].image[None], observation.state[None]

    def undivided() -> None:
        model.after(model.policy.predict_action_chunk(model.ready(image, state, [observation.task])))

    latent = policy.think(observation)
    taken: dict[str, list[float]] = {"think": [], "act": [], "predict": []}
    calls = {
        "think": lambda: policy.think(observation),
        "act": lambda: policy.act(observation, latent, 0),
        "predict": undivided,
    }
    with torch.no_grad():
        for _ in range(acts):
            for name, call in calls.items():  # in turns, so that a busy machine is busy for all
                begun = time.perf_counter()
                call()
                taken[name].append(1e3 * (time.perf_counter() - begun))
    return {name: float(np.median(values)) for name, values in taken.items()}


def seed_results(size: PrefixAgeSize, seed: int, root: Path) -> dict[str, Any]:
    """{(way, age, task): (error, on target)} of one training seed, and the times."""
    import torch

    torch.set_num_threads(1)
    begun = time.monotonic()
    demonstrations = demonstrate(size.demonstrations, size.demonstrated, 10_000 * seed)
    held_out = demonstrate(max(2, size.demonstrations // 4), size.demonstrated, HELD_OUT)
    models = {}
    for name, max_age in (("stock", 0), ("aged", max(size.ages))):
        models[name] = train(root / f"{name}-{seed}", size, demonstrations, seed, max_age)
        sys.stderr.write(f"seed {seed}: trained '{name}' ({time.monotonic() - begun:.0f} s)\n")
    found: dict[str, Any] = {"ms": times(root / f"stock-{seed}", size.acts)}
    for way, name in LEARNED.items():
        for age in size.ages:
            for task in SCENES:
                if age or way != OLD:  # without age, both ways of the stock network are the same
                    model = models[name]
                    one = (error(model, way, age, held_out, size, task), on_target(model, way, age, size, task))
                    found[_cell(way, age, task)] = one
    for task in SCENES:
        found[_cell(OLD, 0, task)] = found[_cell(FRESH, 0, task)]
    sys.stderr.write(f"seed {seed}: done ({time.monotonic() - begun:.0f} s)\n")
    return found


def _cell(way: str, age: int, task: str) -> str:
    return f"{way}, {age}, {task}"


def measure(quick: bool) -> Result:
    """All ways at all ages, a process for each seed."""
    size = QUICK if quick else FULL
    with tempfile.TemporaryDirectory(prefix="vla-fleet-bench-") as directory, process_pool(len(size.seeds)) as pool:
        runs = list(pool.map(seed_results, [size] * len(size.seeds), size.seeds, [Path(directory)] * len(size.seeds)))
    return report(size, runs)


def report(size: PrefixAgeSize, runs: list[dict[str, Any]]) -> Result:
    """The tables."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for task, scene in SCENES.items():
        for which, what in enumerate(
            ("error of the executed actions, share of their range", "share of ticks on target")
        ):
            rows = []
            for age in size.ages:
                row: dict[str, Any] = {"age of the prefix, ticks": age, "ms": round(1000 * age / SPEC.control_hz)}
                for way in LEARNED:
                    values = [found[_cell(way, age, task)][which] for found in runs]
                    row[way] = interval(values) if which else f"{np.mean(values):.3f}"
                rows.append(row)
            tables[f"{scene[0].upper()}{scene[1:]}: {what}"] = rows
    ms = {name: float(np.median([found["ms"][name] for found in runs])) for name in runs[0]["ms"]}

    def mean(way: str, age: int, task: str, which: int) -> float:
        return float(np.mean([found[_cell(way, age, task)][which] for found in runs]))

    goals = []
    for age in [age for age in size.ages if age in (4, 8)]:
        gain = mean(FRESH, age, STILL, 1) - mean(FRESH, 0, STILL, 1)
        goals.append(Goal(f"square stands still, age {age}: on target, minus age 0", gain, "above -0.1", gain > -0.1))
        gain = mean(FRESH, age, MOVING, 1) - mean(OLD, age, MOVING, 1)
        goals.append(
            Goal(f"square circles, age {age}: on target, minus the old state's", gain, "above -0.1", gain > -0.1)
        )
    goals.append(
        Goal(
            "time of act, share of the undivided policy's", ms["act"] / ms["predict"], "< 1", ms["act"] < ms["predict"]
        )
    )
    shown = [{"think": ms["think"], "act": ms["act"], "undivided": ms["predict"]}]
    titles = list(tables)
    return Result(
        "The age of a vision-language prefix",
        tables[titles[0]],
        goals,
        [
            f"First table: {titles[0][0].lower()}{titles[0][1:]}.",
            f"A SmolVLA of {_parameters(size):,} parameters, {size.gradient_steps} gradient steps of batch {size.batch}"
            f" on {2 * size.demonstrations} episodes; {len(size.seeds)} training seed(s), in brackets the lowest and "
            f"highest; {size.samples} moments and {size.episodes} episodes of {size.ticks} ticks in each cell, at "
            f"{SPEC.control_hz:g} Hz, {EXECUTE} actions executed of each chunk of {size.horizon}.",
            "Milliseconds on one thread, from observation to actions. A real SmolVLA looks at images of 512x512 "
            "pixels: there the share of looking is larger.",
            "Nothing disturbs the robot, so a plan from an old moment stays true where its past actions are left out; "
            "a network that was not trained for ages takes an old image for one of now.",
        ],
        {title: tables[title] for title in titles[1:]} | {"Median milliseconds of a call": shown},
    )


def _build(directory: Path, size: PrefixAgeSize, seed: int = 0, examples: NormalizationData | None = None) -> Path:
    from policies.lerobot.tiny import build_tiny

    return build_tiny(
        "smolvla",
        directory,
        SPEC,
        list(INSTRUCTIONS.values()),
        chunk=size.horizon,
        seed=seed,
        examples=examples,
        size=size.network,
        changes=CHANGES,
    )


def _parameters(size: PrefixAgeSize) -> int:
    with tempfile.TemporaryDirectory() as directory:
        return sum(one.numel() for one in Model(_build(Path(directory) / "one", size)).policy.parameters())


def main(arguments: list[str] | None = None) -> int:
    """See the head of this file."""
    require("torch", "lerobot", "transformers", extra="lerobot")
    return run("prefix_age", measure, arguments)


if __name__ == "__main__":
    # A spawned process finds what it is given by the name of its module, and `__main__` is another one there.
    from benchmarks.prefix_age.__main__ import main as importable

    sys.exit(importable())
