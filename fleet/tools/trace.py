"""`vla-fleet trace`: the way of one step as a table for people, and as an OpenTelemetry trace for Jaeger or Tempo.

The file is OTLP/JSON: ids in hexadecimal, 64-bit numbers as text (opentelemetry.io/docs/specs/otlp).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import msgspec
from rich.table import Table

from cloud_learner.buffer.step_path import PathStage, StepPath
from wire.errors import storage_errors

_INTERNAL = 1
"""SPAN_KIND_INTERNAL"""
_CLOUD = ("gateway", "trainer")


class _OtlpStruct(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Of OTLP, whose names are in camel case."""


class OtlpAttribute(_OtlpStruct, frozen=True):
    key: str
    value: dict[str, str]


class OtlpSpan(_OtlpStruct, frozen=True):
    trace_id: str
    span_id: str
    name: str
    kind: int
    start_time_unix_nano: str
    end_time_unix_nano: str
    parent_span_id: str = ""
    attributes: tuple[OtlpAttribute, ...] = ()


class OtlpScope(_OtlpStruct, frozen=True):
    name: str
    version: str


class ScopeSpans(_OtlpStruct, frozen=True):
    scope: OtlpScope
    spans: tuple[OtlpSpan, ...]


class TelemetryResource(_OtlpStruct, frozen=True):
    attributes: tuple[OtlpAttribute, ...]


class ResourceSpans(_OtlpStruct, frozen=True):
    resource: TelemetryResource
    scope_spans: tuple[ScopeSpans, ...]


class TracesData(_OtlpStruct, frozen=True):
    resource_spans: tuple[ResourceSpans, ...]


def otlp(path: StepPath) -> TracesData:
    """The trace of a step: one span for all of it, and one below that for each stage, by the process it is spent in."""
    trace_id = hashlib.sha256(f"{path.segment} {path.tick}".encode()).hexdigest()[:32]
    began_ns, ended_ns = _bounds(path)
    facts: dict[str, int | str] = {
        "robot": path.robot,
        "episode": path.episode,
        "tick": path.tick,
        "task": path.task,
        "actor": path.actor,
    }
    if path.ended:
        facts["ended"] = path.ended
    whole = PathStage("step", "control", began_ns, ended_ns, facts)
    root = _span(whole, path, trace_id, "")
    by_place: dict[str, list[OtlpSpan]] = {whole.place: [root]}
    for stage in path.stages:
        by_place.setdefault(stage.place, []).append(_span(stage, path, trace_id, root.span_id))
    scope = OtlpScope("vla-fleet", version("vla-fleet"))
    return TracesData(
        tuple(
            ResourceSpans(
                TelemetryResource(_attributes(_process(place, path.robot))), (ScopeSpans(scope, tuple(spans)),)
            )
            for place, spans in by_place.items()
        )
    )


def write_otlp(path: StepPath, file: Path) -> None:
    """Write the trace as OTLP/JSON. Raises `StorageError`."""
    with storage_errors("writing a trace", file):
        file.write_bytes(msgspec.json.format(msgspec.json.encode(otlp(path))))


def path_table(path: StepPath) -> Table:
    """The stages in turn: how long each took, and how long after the beginning it was over."""
    began_ns, _ = _bounds(path)
    title = f"tick {path.tick} of episode {path.episode} of {path.robot} ({path.task}; {path.actor} acted)"
    table = Table(title=title, title_justify="left")
    for name in ("stage", "where", "took", "over after", ""):
        table.add_column(name, justify="right" if name in ("took", "over after") else "left")
    for stage in path.stages:
        facts = ", ".join(f"{name} {value}" for name, value in stage.facts.items())
        took, after = stage.ended_ns - stage.began_ns, stage.ended_ns - began_ns
        table.add_row(stage.name, stage.place, _seconds(took), _seconds(after), facts)
    if path.ended:
        table.caption, table.caption_justify = f"so far: {path.ended}", "left"
    return table


def _bounds(path: StepPath) -> tuple[int, int]:
    return min(stage.began_ns for stage in path.stages), max(stage.ended_ns for stage in path.stages)


def _seconds(duration_ns: int) -> str:
    return f"{duration_ns / 1e6:.1f} ms" if abs(duration_ns) < 1e9 else f"{duration_ns / 1e9:.2f} s"


def _span(stage: PathStage, path: StepPath, trace_id: str, parent: str) -> OtlpSpan:
    span_id = hashlib.sha256(f"{trace_id} {stage.name}".encode()).hexdigest()[:16]
    # the error of a clock's offset must not make a span end before it begins
    began_ns = stage.began_ns + path.unix_offset_ns
    ended_ns = max(began_ns, stage.ended_ns + path.unix_offset_ns)
    attributes = _attributes(stage.facts)
    return OtlpSpan(trace_id, span_id, stage.name, _INTERNAL, str(began_ns), str(ended_ns), parent, attributes)


def _process(place: str, robot: str) -> dict[str, int | str]:
    if place in _CLOUD:
        return {"service.name": place, "service.namespace": "vla-fleet"}
    return {"service.name": f"{robot} {place}", "service.namespace": "vla-fleet", "robot": robot}


def _attributes(facts: Mapping[str, int | str]) -> tuple[OtlpAttribute, ...]:
    kinds = {name: "intValue" if isinstance(value, int) else "stringValue" for name, value in facts.items()}
    return tuple(OtlpAttribute(name, {kinds[name]: str(value)}) for name, value in facts.items())
