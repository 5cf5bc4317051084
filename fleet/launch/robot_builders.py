"""The processes of one robot computer: driver, control, inference, uplink, and the slow path where it thinks apart."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from fleet.config.data_directory import DataDirectory
from fleet.config.process_options import EdgeOptions, EdgePartOptions
from fleet.config.recipe import Recipe
from fleet.config.recipes import get_recipe
from fleet.launch import factories
from fleet.launch.builders import THINKER, gateway_channel, limit_threads
from fleet.launch.process_specs import modules_by_role
from fleet.tools.policy_process import try_policy
from hal.driver_host.proxy import RobotProxy
from hal.driver_host.server import run_driver_server
from hal.driver_host.stop_line import ANSWER_S, send_order
from hal.driver_host.watchdog import CallDeadline
from hal.registry import make_operator, make_robot
from hal.safety.required import require_limits
from robot_edge.inference.slow_path import InlineSlowPath, ProcessSlowPath, RemoteSlowPath, SlowPath
from robot_edge.runtime.forking import has_gpu, preload
from robot_edge.runtime.lifecycle import PARENT, ShutdownSignal, instance_lock
from robot_edge.runtime.process_group import (
    EdgeProcesses,
    StatusKeepalive,
    record_channel,
    run_control,
    run_edge,
    run_inference,
    run_latent_worker,
    run_uplink,
    uplink_channel,
)
from robot_edge.runtime.robot_host import HOST, STOP_FILE, announce_host
from robot_edge.uplink.server import Uplink
from robot_edge.uplink.stop_orders import StopOrders
from wire.clock import MonotonicClock
from wire.errors import ConfigError, suggest
from wire.transport.frame_ring import FrameRing, ring_path
from wire.transport.keys import GATEWAY, load_pair, load_public
from wire.transport.shared_channel import SharedChannel
from wire.transport.zmq_channel import ZmqClient
from wire.types import Role

PARTS = ("robot", "control", "inference", "thinker", "uplink")
THINKING = frozenset(("inference", "thinker"))
"""those that run the policy"""


def edge_processes(options: EdgeOptions) -> EdgeProcesses:
    """One robot's processes, not started yet.

    Raises `ConfigError` for what none of them could start with: an unknown recipe, a missing key, a driver of another
    robot, a real robot without limits.
    """
    options = replace(options, keys=options.key_directory, data=options.root)
    recipe = options.overrides.applied(get_recipe(options.recipe))
    # Fails here, in one line, rather than in each of the children.
    require_limits(make_robot(recipe.robot, recipe.robot_config), recipe.loop.safety)
    load_pair(options.key_directory, options.name)
    load_public(options.key_directory, GATEWAY)
    if options.think:
        load_public(options.key_directory, THINKER)
    parts = PARTS if recipe.think_apart and not options.think else [part for part in PARTS if part != "thinker"]
    arguments = options.arguments()
    commands = {part: [sys.executable, "-m", "fleet.cli", "edge-part", part, *arguments] for part in parts}
    logs = DataDirectory(options.root).logs
    return EdgeProcesses(options.name, commands, logs, THINKING if has_gpu() else frozenset())


def run_robot(options: EdgeOptions) -> None:
    """Run one robot: its driver, control, inference and uplink processes."""
    edge, overrides = edge_processes(options), options.overrides
    # Whoever started this as one of many has tried it.
    if overrides.policy and PARENT not in os.environ:
        shutdown = ShutdownSignal()
        if not try_policy(options.recipe, overrides, 0, lambda: shutdown.requested):
            return
    preload(modules_by_role(overrides.applied(get_recipe(options.recipe)), overrides.policy)[Role.edge])
    run_edge(edge)


def run_edge_part(options: EdgePartOptions) -> None:
    """One process of a robot; started by `edge`."""
    recipe, data = options.overrides.applied(get_recipe(options.recipe)), DataDirectory(options.root)
    name, run_directory, part = options.name, options.run_dir, options.part
    if part not in PARTS:
        raise ConfigError(f"a robot has no part '{part}'.{suggest(part, PARTS)} It has {', '.join(PARTS)}.")
    with instance_lock(data.edge(name) / f"{part}.lock"):
        match part:
            case "robot":
                _driver(recipe, data.edge(name), run_directory, options.operator)
            case "control":
                _control(recipe, data, options)
            case "inference":
                _inference(recipe, options)
            case "thinker":
                _thinker(recipe, run_directory)
            case _:
                _uplink(recipe, data, options)


def _driver(recipe: Recipe, directory: Path, run_directory: Path, operated: bool) -> None:
    announce_host(run_directory, directory)
    robot = make_robot(recipe.robot, recipe.robot_config)
    require_limits(robot, recipe.loop.safety)
    operator = make_operator(recipe.robot, robot) if operated else None
    shutdown = ShutdownSignal()
    timeouts = recipe.loop.driver
    # Control names the driver that blocks first; then its process ends.
    deadline = CallDeadline(timeouts.stuck_s, timeouts.reset_s + timeouts.stuck_s, timeouts.stuck_coasting_s)
    run_driver_server(
        robot,
        run_directory / HOST,
        lambda: shutdown.requested,
        recipe.loop.safety,
        operator=operator,
        deadline=deadline,
        stop_file=directory / STOP_FILE,
    )


def _control(recipe: Recipe, data: DataDirectory, options: EdgePartOptions) -> None:
    clock, timeouts = MonotonicClock(), recipe.loop.driver
    name, run_directory, operated = options.name, options.run_dir, options.operator
    uplink = record_channel(run_directory, recipe.spec, uplink=False)
    robot = RobotProxy(recipe.spec, run_directory / HOST, call_s=timeouts.call_s, slow_call_s=timeouts.reset_s)
    ring = _frames(recipe, run_directory)
    inference = SharedChannel(run_directory / "inference-control", bind=False, polls=True, ring=ring)
    with factories.record_flight(recipe, name, data.edge(name) / "flight", operated=operated) as flight:
        loop = factories.make_control(
            recipe, name, uplink, inference, clock, operated=operated, robot=robot, operator=robot, flight=flight
        )
        robot.meanwhile = StatusKeepalive(loop, uplink, clock).poll
        run_control(loop, uplink, recipe.tasks, flight, options.site)


def _inference(recipe: Recipe, options: EdgePartOptions) -> None:
    from robot_edge.inference.server import Inference

    limit_threads()
    clock, name, run_directory = MonotonicClock(), options.name, options.run_dir
    ring = _frames(recipe, run_directory)
    control = SharedChannel(run_directory / "inference-control", bind=True, ring=ring)
    uplink = uplink_channel(run_directory, "inference")
    policy, standby = (recipe.make_policy(recipe.spec, os.getpid()) for _ in range(2))
    channels: list[SharedChannel | ZmqClient] = [control, uplink]
    slow: SlowPath
    if options.think:
        remote = ZmqClient(options.think, name, options.key_directory, THINKER)
        channels.append(remote)
        slow = RemoteSlowPath(remote, clock)
    elif recipe.think_apart:
        beside = SharedChannel(run_directory / "thinker", bind=True, ring=ring)
        channels.append(beside)
        slow = ProcessSlowPath(beside, clock)
    else:
        slow = InlineSlowPath(policy, standby)
    local = recipe.make_local(recipe.spec) if recipe.make_local is not None else None
    inference = Inference(
        name, policy, control, uplink, clock, standby=standby, slow=slow, config=recipe.slow, local=local
    )
    run_inference(inference, channels)
    inference.close()


def _thinker(recipe: Recipe, run_directory: Path) -> None:
    from robot_edge.inference.latent_server import LatentEncoder, LatentWorker

    limit_threads()
    ring = _frames(recipe, run_directory)
    channel = SharedChannel(run_directory / "thinker", bind=False, ring=ring)
    run_latent_worker(
        LatentWorker(channel, LatentEncoder(lambda: recipe.make_policy(recipe.spec, os.getpid()))), channel
    )


def _frames(recipe: Recipe, run_directory: Path) -> FrameRing:
    """The robot's frames, to be read; the driver's host writes them."""
    return FrameRing(ring_path(run_directory / HOST, recipe.spec), recipe.spec, write=False)


def _uplink(recipe: Recipe, data: DataDirectory, options: EdgePartOptions) -> None:
    name, run_directory = options.name, options.run_dir
    control = record_channel(run_directory, recipe.spec, uplink=True)
    inference = uplink_channel(run_directory, "inference", uplink=True)
    operator = uplink_channel(run_directory, "operator", uplink=True)
    with gateway_channel(options, name) as channel:
        clock = MonotonicClock()
        stops = StopOrders(name, lambda order: send_order(run_directory / HOST, order, ANSWER_S), clock)
        uplink = Uplink(name, data.edge(name), channel, control, inference, clock, stops=stops)
        uplink.operator = operator
        run_uplink(uplink, channel, inference, operator)
