"""What fleets of N robots do, by formulas that are checked by hand, against a simulation and at their edges."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from fleet.planning.model import MOST_ROBOTS, Bottleneck, FleetFigures, fleet_row, make_plan
from wire.errors import ConfigError

FAST = 1e21
"""bytes a second of a link that is no obstacle"""


def figures(**changed: Any) -> FleetFigures:
    """A trainer of 1,000 steps a second, robots of 10 each, links and gateway that are no obstacle."""
    usual: dict[str, Any] = {
        "gradient_step_s": 0.1,
        "draws_per_step": 100,
        "publish_every_s": 5.0,
        "version_bytes": 1e6,
        "gateway_up_bytes_s": FAST,
        "gateway_down_bytes_s": FAST,
        "robot_up_bytes_s": FAST,
        "robot_down_bytes_s": FAST,
        "control_hz": 10.0,
        "step_bytes": 1000.0,
        "segment_s": 1.0,
        "ingest_bytes_s": FAST,
    }
    return FleetFigures(**usual | changed)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("gradient_step_s", 0, "gradient_step_s is 0; it must be above 0"),
        ("version_bytes", -1, "version_bytes is -1; it must be above 0"),
        ("robot_up_bytes_s", float("nan"), "robot_up_bytes_s is nan"),
        ("apply_s", -0.5, "apply_s is -0.5; it must be 0 or more"),
        ("active", 1.5, "active is 1.5; it is a share"),
        ("steps_per_publish", 0.5, "a version has at least one step"),
    ],
)
def test_figures_that_cannot_be_are_refused(name: str, value: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        figures(**{name: value})


@pytest.mark.parametrize(("max_lag", "shown"), [(-1, []), (3, [0, 4]), (3, [MOST_ROBOTS + 1])])
def test_plans_that_cannot_be_are_refused(max_lag: int, shown: list[int]) -> None:
    with pytest.raises(ConfigError, match="plan: a lag of"):
        make_plan(figures(), max_lag, shown)


def test_as_many_robots_are_enough_as_record_what_the_trainer_uses_up() -> None:
    plan = make_plan(figures(), 2)
    assert (plan.needed_steps_s, plan.busy_robots, plan.most_robots) == (1000, 100, MOST_ROBOTS)
    assert plan.bottleneck == plan.best.bottleneck == Bottleneck.trainer
    assert make_plan(figures(draws_per_insert=4), 2).busy_robots == 25
    assert make_plan(figures(active=0.5), 2).busy_robots == 200
    half = fleet_row(figures(), 50, 2)
    assert (half.trainer_busy, half.bottleneck, half.arriving_steps_s) == (0.5, Bottleneck.robots, 500)


def test_the_lag_is_that_of_the_planning_formula() -> None:
    # k - 1 + ceil(T / T_train) in gradient steps, ceil(T / T_pub) in versions: T is the way there and back
    for k, apply_s, segment_s in ((1, 0.35, 0.5), (10, 0.0, 1.0), (50, 3.0, 2.5), (7, 12.0, 0.05)):
        f = figures(publish_every_s=0.0, steps_per_publish=k, apply_s=apply_s, segment_s=segment_s)
        row, way_s = fleet_row(f, 200, 10**6), apply_s + segment_s
        assert row.publish_every_s == pytest.approx(0.1 * k)
        assert row.lag_steps == k - 1 + math.ceil(round(way_s / 0.1, 6))
        assert row.lag == math.ceil(round(way_s / (0.1 * k), 6))


def test_no_step_of_a_simulated_fleet_is_further_behind_and_some_are_as_far() -> None:
    rng = np.random.default_rng(4)
    for _ in range(40):
        publish_s, apply_s, segment_s, chunk_s = rng.uniform(0.05, 4, 4)
        f = figures(publish_every_s=publish_s, apply_s=apply_s, segment_s=segment_s, chunk_s=chunk_s)
        row = fleet_row(f, 100, 0)
        decided = np.arange(60, 100, 1e-3)
        acted = np.floor((decided - row.broadcast_s) / row.publish_every_s)
        arrived = decided + row.arrive_s
        lag = np.floor(arrived / row.publish_every_s) - acted
        assert lag.max() == row.lag


def test_a_starved_trainer_makes_versions_less_often() -> None:
    counted = figures(publish_every_s=0.0, steps_per_publish=10)
    assert fleet_row(counted, 100, 0).publish_every_s == pytest.approx(1.0)
    assert fleet_row(counted, 25, 0).publish_every_s == pytest.approx(4.0)
    assert fleet_row(figures(), 1, 0).publish_every_s == pytest.approx(10.0)


def test_links_that_versions_fill_make_the_lag_grow_with_the_robots() -> None:
    slow = figures(gateway_up_bytes_s=1e6)
    rows = [fleet_row(slow, robots, 3) for robots in (1, 5, 10, 100)]
    assert [row.broadcast_s for row in rows] == [1, 5, 10, 100]
    assert [row.lag for row in rows] == sorted(row.lag or 0 for row in rows)
    plan = make_plan(slow, 3)
    assert plan.most_robots is not None
    assert (plan.busy_robots, plan.bottleneck) == (None, Bottleneck.link)
    assert fleet_row(slow, plan.most_robots, 3).within and not fleet_row(slow, plan.most_robots + 1, 3).within
    assert {plan.most_robots, plan.most_robots + 1} <= {row.robots for row in plan.rows}
    # robots that relay it take it further
    relayed = msgspec.structs.replace(slow, relay_fanout=2, relay_chunk_bytes=1e4)
    assert fleet_row(relayed, 100, 3).within
    assert make_plan(relayed, 3).busy_robots == 100


def test_a_relayed_version_takes_its_size_and_a_piece_for_each_hop() -> None:
    f = figures(gateway_up_bytes_s=1e6, relay_chunk_bytes=1e4)
    assert f.fetch_s(8) == pytest.approx(8.0)
    chain = msgspec.structs.replace(f, relay_fanout=1)
    assert chain.fetch_s(1) == pytest.approx(1.0)
    assert chain.fetch_s(8) == pytest.approx(1.0 + 7 * 0.01)
    # two at a time halve the pace; 2 + 4 robots are two hops away
    tree = msgspec.structs.replace(f, relay_fanout=2)
    assert [tree.fetch_s(n) for n in (2, 6, 7)] == pytest.approx([2.0, 2.02, 2.04])


def test_what_is_recorded_faster_than_it_is_carried_or_taken_in_lags_without_end() -> None:
    narrow = fleet_row(figures(robot_up_bytes_s=5e3), 10, 10**6)
    assert (narrow.lag, narrow.lag_steps, narrow.within) == (None, None, False)
    assert (narrow.bottleneck, narrow.arriving_steps_s, narrow.link_share) == (Bottleneck.link, 50, 2.0)
    full = figures(ingest_bytes_s=500e3)
    assert fleet_row(full, 50, 9).within and fleet_row(full, 51, 9).lag is None
    plan = make_plan(full, 9)
    assert (plan.busy_robots, plan.most_robots, plan.bottleneck) == (None, 50, Bottleneck.gateway)
    assert plan.best.trainer_busy == 0.5
    messages = make_plan(figures(gateway_robots=60), 9)
    assert (messages.most_robots, messages.bottleneck) == (60, Bottleneck.gateway)


def test_robots_that_hand_in_late_are_named_and_so_is_an_interval_that_would_do() -> None:
    late = figures(publish_every_s=1.0, segment_s=20.0)
    plan = make_plan(late, 5)
    assert (plan.busy_robots, plan.most_robots, plan.bottleneck) == (None, 2, Bottleneck.robots)
    hurried = figures(publish_every_s=1.0, segment_s=20.0, draws_per_step=1)
    plan = make_plan(hurried, 5)
    assert (plan.most_robots, plan.best.robots, plan.bottleneck) == (None, 1, Bottleneck.robots)
    assert plan.publish_every_s == pytest.approx(4.0, abs=1e-3)
    assert plan.publish_every_s is not None
    assert make_plan(msgspec.structs.replace(hurried, publish_every_s=plan.publish_every_s), 5).busy_robots == 1
    assert make_plan(hurried, 0).publish_every_s is None


def test_rows_are_those_that_were_asked_for_or_that_tell_something() -> None:
    assert [row.robots for row in make_plan(figures(), 2, [7, 3, 7]).rows] == [3, 7]
    assert [row.robots for row in make_plan(figures(), 2).rows] == [1, 2, 4, 8, 16, 32, 64, 100, 128]
