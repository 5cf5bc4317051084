"""A plan for people: what it follows from, the fleets side by side, and what to do."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from fleet.planning.measured import MBIT, Figures, PlanFigure
from fleet.planning.model import MOST_ROBOTS, Bottleneck, FleetPlan

_WHAT: dict[str, tuple[str, float, str]] = {
    "gradient_step_s": ("a gradient step", 1.0, "s"),
    "draws_per_step": ("steps drawn for it", 1.0, ""),
    "draws_per_insert": ("draws of a recorded step", 1.0, ""),
    "publish_every_s": ("between versions, at least", 1.0, "s"),
    "steps_per_publish": ("gradient steps between versions, at least", 1.0, ""),
    "version_bytes": ("a version", 1e6, "MB"),
    "publish_s": ("to hand it to the gateway", 1.0, "s"),
    "apply_s": ("to act on it", 1.0, "s"),
    "gateway_up_bytes_s": ("gateway to robots", MBIT, "Mbit/s"),
    "gateway_down_bytes_s": ("robots to gateway", MBIT, "Mbit/s"),
    "robot_up_bytes_s": ("a robot up", MBIT, "Mbit/s"),
    "robot_down_bytes_s": ("a robot down", MBIT, "Mbit/s"),
    "relay_fanout": ("robots that one relays to", 1.0, ""),
    "relay_chunk_bytes": ("a relayed piece", 1e6, "MB"),
    "control_hz": ("a robot's steps", 1.0, "1/s"),
    "active": ("share of the time it records", 1.0, ""),
    "step_bytes": ("a recorded step", 1e3, "kB"),
    "segment_s": ("recording handed in at once", 1.0, "s"),
    "chunk_s": ("actions of one chunk", 1.0, "s"),
    "ingest_bytes_s": ("the gateway takes in", 1e6, "MB/s"),
    "gateway_robots": ("robots it can serve", 1.0, ""),
    "max_lag": ("S, the largest lag", 1.0, "versions"),
}


def figures_table(figures: Figures) -> Table:
    """What the plan follows from, and who says so."""
    table = Table(title="what is known", title_justify="left")
    for name, justify in (("", "left"), ("figure", "right"), ("from", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name, figure in figures.items():
        table.add_row(_WHAT[name][0], _value(name, figure), figure.source)
    return table


def _value(name: str, figure: PlanFigure) -> str:
    _, scale, unit = _WHAT[name]
    return f"{figure.value / scale:.4g} {unit}".rstrip()


def plan_table(plan: FleetPlan) -> Table:
    """The fleets side by side."""
    table = Table(title=f"robots, with a lag of at most S = {plan.max_lag} versions", title_justify="left")
    names = ("robots", "steps/s", "trainer busy", "version every", "acts after", "lag", "in gradient steps")
    for name in (*names, "links", "gateway"):
        table.add_column(name, justify="right")
    table.add_column("bottleneck")
    for row in plan.rows:
        beyond = "" if row.within else " > S"
        table.add_row(
            str(row.robots),
            f"{row.arriving_steps_s:,.0f}",
            f"{row.trainer_busy:.0%}",
            f"{row.publish_every_s:.3g} s",
            f"{row.broadcast_s:.3g} s",
            f"{row.lag:,}{beyond}" if row.lag is not None else "grows",
            f"{row.lag_steps:,}" if row.lag_steps is not None else "grows",
            f"{row.link_share:.0%}",
            f"{row.ingest_share:.0%}",
            row.bottleneck.value,
            style="bold" if row.robots == plan.busy_robots else "" if row.within else "dim",
        )
    return table


def verdict(plan: FleetPlan) -> Iterator[str]:
    """What follows, in sentences."""
    best = plan.best
    if plan.busy_robots is not None:
        enough = f"{_robots(plan.busy_robots)} keep{'s' if plan.busy_robots == 1 else ''} the trainer busy"
        yield f"{enough}, which uses up {plan.needed_steps_s:,.0f} recorded steps a second."
    elif plan.most_robots is not None:
        yield (
            f"No number of robots keeps the trainer busy at S = {plan.max_lag}: {_robots(best.robots)} keep it busy "
            f"{best.trainer_busy:.0%} of the time. {_advice(plan.bottleneck)}"
        )
    else:
        yield f"Not even one robot has a lag within S = {plan.max_lag}. {_advice(plan.bottleneck)}"
    if plan.most_robots is not None and plan.most_robots < MOST_ROBOTS:
        yield f"The lag stays within S = {plan.max_lag} up to {_robots(plan.most_robots)}."
    if not best.within and plan.publish_every_s is not None:
        yield (
            f"A version every {plan.publish_every_s:.3g} s instead of {best.publish_every_s:.3g} s would keep it "
            f"within S for {_robots(best.robots)}."
        )
    yield f"Bottleneck: {plan.bottleneck.value}."


def _robots(count: int) -> str:
    return f"{count:,} robot{'s' if count > 1 else ''}"


def _advice(limit: Bottleneck) -> str:
    match limit:
        case Bottleneck.trainer:
            return "Publish less often, or allow a larger lag."
        case Bottleneck.robots:
            return "Robots hand in too little or too late: shorter chunks and segments, or fewer versions."
        case Bottleneck.link:
            return (
                "The links are too slow: smaller versions, robots that relay them (--relay-fanout), smaller pictures."
            )
        case Bottleneck.gateway:
            return "Give each site a gateway of its own (docs/scaling.md)."
