"""What a trainer shows to Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from cloud_learner.training.trainer import Trainer
from wire.clock import Clock
from wire.metrics import PREFIX, trainer_metrics


class TrainerMetrics:
    """A `wire.metrics.MetricSource`; each scrape reads what the trainer noted last, at most half a second ago."""

    def __init__(self, trainer: Trainer, clock: Clock) -> None:
        """`clock`: the trainer's."""
        self._trainer, self._clock = trainer, clock

    def collect(self) -> Iterator[Metric]:
        counts = self._trainer.counts
        if counts.status is not None:
            yield from trainer_metrics(counts.status)
        if (data := counts.dataset) is not None:
            for name, text, count in (
                ("batches", "Batches that were drawn.", data.batches),
                ("draws", "Steps that were drawn for them.", counts.draws),
                ("loaded_segments", "Segments brought into memory: all other draws hit the cache.", data.loaded),
                ("submitted_segments", "Segments that came from the gateway and were not read.", data.from_gateway),
                ("damaged_segments", "Segments that could not be read and were left out.", data.damaged),
            ):
                yield CounterMetricFamily(f"{PREFIX}trainer_{name}", text, count)
            yield GaugeMetricFamily(f"{PREFIX}trainer_cache_bytes", "Memory of the cache.", data.bytes)
        for name, text, seconds in (
            ("batch_wait", "Waited for batches.", counts.batch_wait_s),
            ("gradient_step", "Spent on gradient steps.", counts.gradient_step_s),
        ):
            yield CounterMetricFamily(f"{PREFIX}trainer_{name}_seconds", text, seconds)
        made = counts.publishing
        for name, text, count in (
            ("whole_versions", "Versions that went whole, not as a delta.", made.whole),
            ("unquantized_versions", "Of these, whose actions quantisation changed too much.", made.unquantized),
            ("version_bytes", "Bytes of the versions and deltas that were made.", made.sent_bytes),
        ):
            yield CounterMetricFamily(f"{PREFIX}trainer_{name}", text, count)
        text = "To make a version beside the gradient steps: its delta, its hash, its checks."
        yield SummaryMetricFamily(f"{PREFIX}trainer_version_seconds", text, made.made, made.seconds)
        for name, text, change in (
            ("action_change", "Of actions from the version before, in their range.", made.action_change),
            ("quantization_change", "Of actions by the quantisation of a delta alone.", made.quantization_change),
        ):
            yield GaugeMetricFamily(f"{PREFIX}trainer_{name}", text, change)
        text = "From the copy of a version's weights until the gateway had it."
        yield SummaryMetricFamily(f"{PREFIX}trainer_publish_seconds", text, counts.published, counts.publish_s)
        yield GaugeMetricFamily(f"{PREFIX}trainer_policy_version", "The version it published last.", counts.version)
        if counts.saved_ns:
            age_s = (self._clock.now_ns() - counts.saved_ns) / 1e9
            yield GaugeMetricFamily(f"{PREFIX}trainer_checkpoint_age_seconds", "Since the newest checkpoint.", age_s)
