"""What processes say of themselves to Prometheus: the figures that messages carry, and the page that shows them.

The gateway shows what its robots and its trainer report; each of them may show the same figures itself, under the same
names. docs/operating.md lists all names.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from wire.errors import ConfigError
from wire.messages.gateway import EdgeStatus, TrainerStatus
from wire.types import Mode

PREFIX = "vla_fleet_"
_LONGEST_REASON = 100


class MetricSource(Protocol):
    """Whoever has figures to show; asked at each scrape, by any thread."""

    def collect(self) -> Iterator[Metric]: ...


class RobotSample(msgspec.Struct, frozen=True):
    """What is known of a robot at the moment of a scrape."""

    status: EdgeStatus
    link_age_s: float
    """since the other end of its connection was heard: the robot by the gateway, the gateway by the robot"""
    newest_version: int
    """that there is, as far as whoever shows this knows; 0: none"""


_ROBOT_COUNTERS: dict[str, tuple[str, Callable[[EdgeStatus], float]]] = {
    "ticks": ("Control periods.", lambda status: status.ticks),
    "missed_ticks": ("Control periods that were left out because one before took too long.", lambda s: s.missed_ticks),
    "starved_ticks": ("Control periods for which the policy had no action in time.", lambda s: s.starved_ticks),
    "episodes": ("Episodes that ended.", lambda s: s.episodes),
    "interventions": ("Times that a person or a script took over.", lambda s: s.interventions),
    "recorded_steps": ("Steps ever written to the robot's spool.", lambda s: s.steps_recorded),
    "dropped_steps": ("Steps of the policy alone that its spool had no room for.", lambda s: s.steps_dropped),
}
_ROBOT_GAUGES: dict[str, tuple[str, Callable[[RobotSample], float]]] = {
    "late_p99_seconds": ("How late control periods begin, 99th percentile.", lambda one: one.status.late_p99_s),
    "spooled_segments": ("Segments that wait for an acknowledgement.", lambda one: one.status.spooled),
    "policy_version": ("Policy version that acts.", lambda one: one.status.version),
    "policy_version_lag": (
        "Versions by which the one that acts is behind the newest.",
        lambda one: max(0, one.newest_version - one.status.version),
    ),
    "link_age_seconds": ("Since the other end of the robot's connection was heard.", lambda one: one.link_age_s),
}


def robot_metrics(samples: Iterable[RobotSample]) -> Iterator[Metric]:
    """The figures of robots, each with the label `robot`."""
    robots = {sample.status.robot: sample for sample in samples}
    mode = GaugeMetricFamily(f"{PREFIX}robot_mode", "1 for the mode the robot is in.", labels=("robot", "mode"))
    hold = GaugeMetricFamily(f"{PREFIX}robot_hold", "1 while the robot holds, by reason.", labels=("robot", "reason"))
    for name, sample in robots.items():
        for one in Mode:
            mode.add_metric((name, one), float(sample.status.mode == one))
        if sample.status.reason:
            hold.add_metric((name, sample.status.reason[:_LONGEST_REASON]), 1.0)
    yield mode
    yield hold
    for key, (text, count) in _ROBOT_COUNTERS.items():
        counter = CounterMetricFamily(f"{PREFIX}robot_{key}", text, labels=("robot",))
        for name, sample in robots.items():
            counter.add_metric((name,), count(sample.status))
        yield counter
    for key, (text, value) in _ROBOT_GAUGES.items():
        gauge = GaugeMetricFamily(f"{PREFIX}robot_{key}", text, labels=("robot",))
        for name, sample in robots.items():
            gauge.add_metric((name,), value(sample))
        yield gauge


def trainer_metrics(status: TrainerStatus) -> Iterator[Metric]:
    """The figures of a trainer."""
    phase = GaugeMetricFamily(f"{PREFIX}trainer_phase", "1 for the phase the trainer is in.", labels=("phase",))
    phase.add_metric((status.phase[:_LONGEST_REASON],), 1.0)
    yield phase
    yield CounterMetricFamily(f"{PREFIX}trainer_gradient_steps", "Gradient steps.", status.gradient_steps)
    text = "Versions that the trainer did not let out."
    yield CounterMetricFamily(f"{PREFIX}trainer_refused_versions", text, status.refused)
    for key, text, value in (
        ("loss", "Mean loss of the last 50 gradient steps.", status.loss),
        ("steps_per_second", "Gradient steps a second while it trains, over the last 50.", status.steps_per_s),
        ("eligible_steps", "Recorded steps that may be drawn.", status.imitated_steps),
        ("cached_segments", "Segments in memory.", status.cached_segments),
        ("rollout_steps", "Recorded steps that the policy did by itself.", status.rollout_steps),
        ("stale_steps", "Of those: arrived with a lag above --max-lag; 0 without one.", status.stale_steps),
        ("echo", "Draws of a step, on average, while it is in memory.", status.echo),
    ):
        yield GaugeMetricFamily(f"{PREFIX}trainer_{key}", text, value)


def make_registry(*sources: MetricSource) -> CollectorRegistry:
    """What a page shows: these sources, and this process's memory, processor time and open files."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    for source in sources:
        registry.register(source)
    return registry


class MetricsServer:
    """Shows figures at http://HOST:PORT/metrics, in a thread of its own, until `close`."""

    def __init__(self, host: str, port: int, *sources: MetricSource) -> None:
        """Port 0 takes a free one. Raises `ConfigError` when the address cannot be used."""
        try:
            self._server, self._thread = start_http_server(port, host, make_registry(*sources))
        except OSError as error:
            why = "is used by another program" if error.errno == errno.EADDRINUSE else f"cannot be opened: {error}"
            raise ConfigError(
                f"metrics: port {port} on {host} {why}. Choose another with --metrics-port, or --metrics-host."
            ) from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
