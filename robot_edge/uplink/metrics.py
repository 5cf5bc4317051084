"""What the uplink shows of its robot to Prometheus: control reports to it anyway, and is not asked for anything."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from robot_edge.uplink.server import Uplink
from wire.clock import Clock
from wire.metrics import PREFIX, RobotSample, robot_metrics


class UplinkMetrics:
    """A `wire.metrics.MetricSource`; each scrape reads what the uplink noted last."""

    def __init__(self, uplink: Uplink, clock: Clock) -> None:
        self._uplink, self._clock = uplink, clock

    def collect(self) -> Iterator[Metric]:
        uplink = self._uplink
        yield GaugeMetricFamily(f"{PREFIX}edge_accepted", "1 while the gateway lets the robot in.", uplink.accepted)
        text = "What was no version or part of one, or was taken back when it was loaded."
        refused = CounterMetricFamily(f"{PREFIX}edge_refused_weights", text, labels=("reason",))
        for reason, count in uplink.weights.refused.copy().items():
            refused.add_metric((reason,), count)
        yield refused
        text = "Times that the site's relay sent what was wrong, or too little, or nothing, and was left out."
        faults = CounterMetricFamily(f"{PREFIX}edge_relay_faults", text, labels=("relay",))
        if (relay := uplink.relay) is not None:
            faults.add_metric((relay.name,), relay.faults)
        yield faults
        status, link_age_s = uplink.status, (self._clock.now_ns() - uplink.heard_ns) / 1e9
        # before control has reported there is nothing to show but the names
        yield from robot_metrics([RobotSample(status, link_age_s, uplink.weights.announced)] if status else [])
