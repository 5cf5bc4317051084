"""Makes each process's objects from a recipe and a data directory. The only place where all rooms meet."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fleet.config.data_directory import DataDirectory
from fleet.config.recipe import Recipe
from fleet.config.recipes import get_recipe
from fleet.evaluation.evaluator import Conditions, EvaluatedRobot, Evaluator
from fleet.evaluation.injected_delay import DelayedChannel, parse_delay
from hal.interfaces.robot import HoldingRobot, Teleoperator, is_real
from hal.registry import make_operator, make_robot
from hal.safety.limited_robot import LimitedRobot
from hal.safety.required import require_limits
from policies.interface.capabilities import Explores
from robot_edge.chunking.factory import make_scheduler
from robot_edge.chunking.scheduler import ChunkScheduler, DelayEstimator, MakeScheduler
from robot_edge.control.loop import ControlLoop
from robot_edge.flight_recorder.events import FlightHeader
from robot_edge.flight_recorder.recorder import FlightRecorder
from wire.clock import Clock, ManualClock, MonotonicClock, SimulatedClock
from wire.messages.gateway import Evaluate, Evaluation
from wire.transport.channel import Channel
from wire.types import PolicyCapabilities

if TYPE_CHECKING:
    from cloud_learner.buffer.ledger.ledger import Ledger
    from cloud_learner.buffer.maintenance.maintenance import MaintenanceThread
    from cloud_learner.gateway.peers import AuthenticatedServerChannel
    from cloud_learner.gateway.server import Gateway
    from cloud_learner.gateway.stop_server import StopServer
    from cloud_learner.operator.view import FleetView


def scheduler_factory(recipe: Recipe) -> MakeScheduler:
    """Makes the scheduler of the recipe's strategy for weights that were trained in some way."""

    # What is known of delays outlives a change of weights.
    delay = DelayEstimator()

    def make(trained: PolicyCapabilities) -> ChunkScheduler:
        return make_scheduler(
            recipe.chunking, recipe.spec, trained, recipe.motion, safety=recipe.loop.safety, delay=delay
        )

    return make


def make_conditions(recipe: Recipe, clock: ManualClock, seed: int) -> Conditions:
    """What an evaluator's episodes are run under: as slow as the robots are."""
    delay = (ticks + recipe.evaluator.delay_ticks for ticks in parse_delay(recipe.delay, seed))
    return Conditions(clock, delay, recipe.slow.every_s, recipe.loop.safety)


def make_control(
    recipe: Recipe,
    name: str,
    uplink: Channel,
    inference: Channel,
    clock: Clock,
    *,
    operated: bool = True,
    paced: bool = True,
    robot: HoldingRobot | None = None,
    operator: Teleoperator | None = None,
    flight: FlightRecorder | None = None,
) -> ControlLoop:
    """The control loop of one robot; `operated`: with the scripted operator at its side.

    `robot` and `operator`: instead of the recipe's own, in this process; `flight`: records all that crosses the loop's
    borders.
    """
    if robot is None:
        # A robot at its own rate stamps with the machine's clock.
        config, stamps = (recipe.robot_config, None) if paced else (recipe.unpaced_config, clock)
        driver = make_robot(recipe.robot, config, stamps)
        require_limits(driver, recipe.loop.safety)
        operator = make_operator(recipe.robot, driver) if operated else None
        robot = LimitedRobot(driver, recipe.loop.safety)
        episodes = recipe.loop.episodes.settled(is_real(driver))
        recipe = replace(recipe, loop=replace(recipe.loop, episodes=episodes))
    operator = operator if operated else None
    session_id = secrets.token_hex(4)
    if recipe.delay != "0":
        inference = DelayedChannel(inference, parse_delay(recipe.delay), recipe.spec.period_ns, clock)
    if flight is not None:
        session_id, robot, clock = flight.session_id, flight.border("robot", robot), flight.border("clock", clock)
        uplink, inference = flight.border("uplink", uplink), flight.border("inference", inference)
        operator = operator and flight.border("operator", operator)
    scheduler = scheduler_factory(recipe)
    return ControlLoop(name, session_id, robot, uplink, inference, scheduler, clock, recipe.loop, operator)


def make_evaluator(
    recipe: Recipe, name: str, data: DataDirectory, gateway: Channel, seed: int, only: Evaluate | None = None
) -> Evaluator:
    """Measures on the recipe's robot, or on those of all its members."""
    robots = [_evaluated(one, short, seed) for short, one in (recipe.members or {"": recipe}).items()]
    weights = data.edge(name) / "weights"
    return Evaluator(name, robots, gateway, weights, MonotonicClock(), recipe.evaluator, only)


def _evaluated(recipe: Recipe, name: str, seed: int) -> EvaluatedRobot:
    simulated = SimulatedClock()
    robot = make_robot(recipe.robot, recipe.unpaced_config, simulated)
    require_limits(robot, recipe.loop.safety)
    policy, conditions = recipe.make_policy(recipe.spec, seed), make_conditions(recipe, simulated, seed)
    if isinstance(policy, Explores):
        policy.stop_exploring()
    given = scheduler_factory(recipe), recipe.measured_tasks, recipe.evaluator.max_ticks, conditions
    return EvaluatedRobot(robot, policy, *given, name)


def make_gateway(
    recipe: Recipe,
    data: DataDirectory,
    channel: AuthenticatedServerChannel,
    clock: Clock | None = None,
    stops: StopServer | None = None,
    secret: bytes = b"",
) -> tuple[Gateway, FleetView, Ledger, MaintenanceThread]:
    """The gateway on `data`, its view for the page, the ledger to close at the end, and maintenance, not started.

    `clock`: that of robots which do not run in real time, for leases and health. `stops`: their own way, not started.
    `secret`: its own key's, by which manifests of versions are signed.
    """
    from cloud_learner.buffer.maintenance.maintenance import MaintenanceThread
    from cloud_learner.gateway.server import Gateway
    from cloud_learner.gateway.storage.ingest import Ingest
    from cloud_learner.gateway.storage.weight_store import WeightStore
    from cloud_learner.operator.view import FleetView
    from hal.resource.admitted_robots import AdmittedRobots, RobotShape
    from wire.identity.sealing import SealOpener
    from wire.weights.manifest import Signer

    ledger, store = data.buffer.open_writer()
    clock = clock or MonotonicClock()
    ingest = Ingest(ledger, store, clock, channel.may_teach)
    ingest.open()
    history = _history(ledger)
    age_s = history[-1][1] if history else 0.0
    view = FleetView(
        MonotonicClock(), instructions=recipe.instructions, steps_stored=ledger.totals().steps, age_s=age_s
    )
    for evaluation, t_s in history:
        view.add_evaluation(evaluation, t_s)
    if (newest := ledger.newest_version()) is not None:
        view.add_version(newest.version)
    weights = WeightStore.open(data.weights, ledger, store.objects, Signer(secret) if secret else None)
    seals = SealOpener(secret, channel.key_record) if secret else None
    shapes = [RobotShape(one.spec, one.tasks, name) for name, one in (recipe.members or {"": recipe}).items()]
    gateway = Gateway(
        channel,
        ledger,
        ingest,
        weights,
        view,
        AdmittedRobots(shapes, recipe.refusal),
        clock,
        stops=stops,
        rollout=recipe.rollout,
        seals=seals,
    )
    return gateway, view, ledger, MaintenanceThread(store, recipe.retention)


def _history(ledger: Ledger) -> list[tuple[Evaluation, float]]:
    """Earlier measurements and when they were made, in seconds of the fleet at work: pauses count as a minute."""
    found: list[tuple[Evaluation, float]] = []
    before_ns, t_s = None, 0.0
    for row in ledger.evaluations():
        if before_ns is not None:
            t_s += min(60.0, max(0.0, (row.wall_ns - before_ns) / 1e9))
        before_ns = row.wall_ns
        found.append((msgspec.convert(row, Evaluation, from_attributes=True), t_s))
    return found


# --- flights ----------------------------------------------------------------------------------------------------------


def record_flight(
    recipe: Recipe, name: str, directory: Path, *, operated: bool
) -> contextlib.AbstractContextManager[FlightRecorder]:
    """The recorder of one start of robot `name`'s control process, closed in the end."""
    header = FlightHeader(
        name=name,
        session_id=secrets.token_hex(4),
        spec=recipe.spec,
        config=recipe.loop,
        chunking=recipe.chunking,
        recipe=recipe.name,
        operated=operated,
        recipe_config=str(recipe.config or ""),
    )
    flight = FlightRecorder(directory, header)
    flight.start()
    return contextlib.closing(flight)


def rebuild_control(
    header: FlightHeader,
    robot: HoldingRobot,
    uplink: Channel,
    inference: Channel,
    clock: Clock,
    operator: Teleoperator | None,
) -> ControlLoop:
    """The control loop that `header` describes, on other borders.

    What a file cannot hold, the robot's motion, is the recipe's of today. Raises `ConfigError` for an unknown recipe.
    """
    config = Path(header.recipe_config) if header.recipe_config else None
    recipe = replace(get_recipe(header.recipe, config=config), loop=header.config, chunking=header.chunking)
    scheduler = scheduler_factory(recipe)
    return ControlLoop(
        header.name, header.session_id, robot, uplink, inference, scheduler, clock, recipe.loop, operator
    )
