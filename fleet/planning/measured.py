"""Where a plan's figures come from: what a person says, a running fleet's /metrics, a fleet's ledger, the recipe.

The first of these that knows a figure is believed; what none knows has a default, but for the length of a gradient step
and the size of a version.
"""

from __future__ import annotations

import statistics
import urllib.request
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from cloud_learner.buffer.ledger.ledger import Ledger
from fleet.config.data_directory import DataDirectory
from fleet.config.recipe import Recipe
from fleet.planning.model import FleetFigures
from wire.errors import ConfigError
from wire.metrics import PREFIX
from wire.types import EpisodeSource

MBIT = 1e6 / 8
"""bytes a second in a megabit a second"""
STABLE_LAG = 6
"""versions at which ECHO-2 learns stably (arXiv 2602.02192)"""
_TIMEOUT_S = 5.0
_NEWEST = 50
"""versions that are looked at"""
_EPISODES = 500
_LONGEST_BYTES = 16 * 2**20
"""of a page of metrics"""
_JPEG = 0.1
"""of a picture's bytes, as far as nothing is measured"""


class PlanFigure(msgspec.Struct, frozen=True):
    """One number of a plan."""

    value: float
    source: str
    """who says so"""


Figures = dict[str, PlanFigure]
"""By the name of a field of `FleetFigures`, or `max_lag`."""

_DEFAULTS = {
    "gateway_up_bytes_s": PlanFigure(1000 * MBIT, "default: 1 Gbit/s"),
    "gateway_down_bytes_s": PlanFigure(1000 * MBIT, "default: 1 Gbit/s"),
    "robot_up_bytes_s": PlanFigure(50 * MBIT, "default: 50 Mbit/s"),
    "robot_down_bytes_s": PlanFigure(100 * MBIT, "default: 100 Mbit/s"),
    # two cores that robots' own processes share, 128 robots
    "ingest_bytes_s": PlanFigure(86e6, "docs/results/wire.md"),
    "gateway_robots": PlanFigure(130, "docs/scaling.md"),
    "max_lag": PlanFigure(STABLE_LAG, "ECHO-2"),
}
_MISSING = {
    "gradient_step_s": "how long a gradient step takes",
    "version_bytes": "how many bytes a version has",
}
_WAYS = {
    "gradient_step_s": "--gradient-step SECONDS",
    "version_bytes": "--version-mb MB",
}


def settle(*sources: Mapping[str, PlanFigure]) -> tuple[FleetFigures, int, Figures]:
    """What a plan follows from, S, and where each figure is from; earlier `sources` are believed first.

    Raises `ConfigError` for a figure that nobody knows, and for one that cannot be.
    """
    found: Figures = {}
    for source in (*sources, _DEFAULTS):
        for name, figure in source.items():
            found.setdefault(name, figure)
    for name, what in _MISSING.items():
        if name not in found:
            raise ConfigError(
                f"plan: nobody has said {what}: give {_WAYS[name]}, --data DIR of a fleet that has trained, or "
                "--metrics URL of one that runs."
            )
    order = {name: number for number, name in enumerate((*FleetFigures.__struct_fields__, "max_lag"))}
    found = dict(sorted(found.items(), key=lambda item: order[item[0]]))
    values = {name: figure.value for name, figure in found.items() if name != "max_lag"}
    if "relay_fanout" in values:
        values["relay_fanout"] = int(values["relay_fanout"])
    return FleetFigures(**values), int(found["max_lag"].value), found  # type: ignore[arg-type]


def of_recipe(recipe: Recipe) -> Figures:
    """What a recipe says of its trainer and its robots."""
    training, spec = recipe.training, recipe.spec
    ticks = training.ticks_per_frame if spec.cameras else 1
    pictures = sum(c.height * c.width * 3 * _JPEG * c.rate_hz for c in spec.cameras) / spec.control_hz
    values = {
        "draws_per_step": training.batch * ticks,
        "publish_every_s": training.publish_every_s,
        "control_hz": spec.control_hz,
        "chunk_s": recipe.chunking.execute_ticks / spec.control_hz,
        "segment_s": 80 / spec.control_hz,
        "step_bytes": pictures + 4 * (spec.state_dim + 2 * spec.action_dim) + 64,
    }
    source = f"recipe {recipe.name}"
    found = {name: PlanFigure(value, source) for name, value in values.items()}
    found["step_bytes"] = PlanFigure(values["step_bytes"], f"{source}, estimated")
    given = recipe.samples_per_insert or recipe.algorithm.needs().samples_per_insert
    found["draws_per_insert"] = PlanFigure(
        given or recipe.echo, f"{source}, {'samples per insert' if given else 'echo'}"
    )
    if recipe.staleness is not None:
        found["max_lag"] = PlanFigure(recipe.staleness.max_lag, source)
    return found


def of_data(root: Path, control_hz: float) -> Figures:
    """What the ledger of a fleet below `root` tells; nothing of what never happened. Raises `FleetError`."""
    with DataDirectory(root).open_buffer() as (ledger, _store):
        values = _of_versions(ledger) | _of_segments(ledger, control_hz)
        acted = _of_robots(ledger)
    found = {name: PlanFigure(value, f"{root}") for name, value in values.items()}
    if acted is not None:
        found["apply_s"] = PlanFigure(acted, f"{root}, the fastest robot's fetch included")
    if "gradient_step_s" in found:
        found["gradient_step_s"] = PlanFigure(found["gradient_step_s"].value, f"{root}, waits included")
    return found


def _of_versions(ledger: Ledger) -> dict[str, float]:
    newest = [row.version for row in ledger.versions()[-_NEWEST:]]
    values: dict[str, float] = {}
    if newest:
        values["version_bytes"] = newest[-1].size_bytes
    # the clock of another start of the trainer's computer tells nothing
    pairs = [
        (after.created_ns - before.created_ns, after.gradient_steps - before.gradient_steps)
        for before, after in pairwise(newest)
    ]
    pairs = [(took_ns, steps) for took_ns, steps in pairs if took_ns > 0 and steps > 0]
    if pairs:
        values["publish_every_s"] = statistics.median(took_ns for took_ns, _ in pairs) / 1e9
        values["gradient_step_s"] = statistics.median(took_ns / steps for took_ns, steps in pairs) / 1e9
    return values


def _of_segments(ledger: Ledger, control_hz: float) -> dict[str, float]:
    totals = ledger.totals()
    if not totals.steps:
        return {}
    values = {
        "step_bytes": totals.bytes / totals.steps,
        "segment_s": totals.steps / totals.segments / control_hz,
    }
    shares = []
    for robot in ledger.robot_totals():
        ended = sorted((row.wall_ns, row.steps) for row in ledger.episodes(robot, _EPISODES) if _is_online(row.source))
        # from the end of the first one on
        if len(ended) > 1 and (span_s := (ended[-1][0] - ended[0][0]) / 1e9) > 0:
            shares.append(sum(steps for _, steps in ended[1:]) / control_hz / span_s)
    if shares:
        values["active"] = min(1.0, statistics.median(shares))
    return values


def _is_online(source: str) -> bool:
    return source == EpisodeSource.online


def _of_robots(ledger: Ledger) -> float | None:
    """Seconds from a version's announcement until the first robot acted on it, as a rule."""
    fastest: dict[int, int] = {}
    for row in ledger.applied():
        took_ns = row.applied_ns - row.announced_ns
        if took_ns >= 0:
            fastest[row.version] = min(took_ns, fastest.get(row.version, took_ns))
    return statistics.median(fastest.values()) / 1e9 if fastest else None


def of_metrics(urls: Iterable[str]) -> Figures:
    """What pages of a running gateway or trainer show: http://HOST:PORT/metrics. Raises `ConfigError`."""
    found: Figures = {}
    for url in urls:
        for name, value in read_metrics(_fetch(url), url).items():
            found.setdefault(name, PlanFigure(value, url))
    return found


def _fetch(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--metrics {url}: give http://HOST:PORT/metrics of a gateway's page or of a trainer.")
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            return bytes(answer.read(_LONGEST_BYTES)).decode(errors="replace")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--metrics {url} cannot be read: {error}. The gateway shows its own at its page's port, a trainer with "
            "--metrics-port."
        ) from error


def read_metrics(page: str, url: str) -> dict[str, float]:
    """Figures of one page. Raises `ConfigError` for what is no page of ours."""
    try:
        samples = {
            sample.name.removeprefix(PREFIX): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name.startswith(PREFIX) and not sample.labels
        }
    except ValueError as error:
        raise ConfigError(f"--metrics {url}: that is no page of metrics: {error}.") from error
    if not samples:
        raise ConfigError(f"--metrics {url}: that page shows nothing of a fleet; give that of a gateway or a trainer.")
    values: dict[str, float] = {}
    rate = samples.get("trainer_steps_per_second", 0.0)
    if rate > 0:
        step_s, wait_s = (samples.get(f"trainer_{name}_seconds_total", 0.0) for name in ("gradient_step", "batch_wait"))
        # only the trainer's own page says what part of a step was waiting for its batch
        values["gradient_step_s"] = (step_s / (step_s + wait_s) if step_s > 0 else 1.0) / rate
    if (count := samples.get("trainer_publish_seconds_count", 0.0)) > 0:
        values["publish_s"] = samples["trainer_publish_seconds_sum"] / count
    if (steps := samples.get("ingest_steps_total", 0.0)) > 0 and (size := samples.get("ingest_bytes_total", 0.0)) > 0:
        values["step_bytes"] = size / steps
    return values
