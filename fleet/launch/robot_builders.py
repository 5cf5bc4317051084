"""The processes of one robot computer: driver, control, inference, uplink, and the slow path where it thinks apart."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

from fleet.config.data_directory import DataDirectory
from fleet.config.process_options import EdgeOptions, EdgePartOptions, default
from fleet.config.recipe import Recipe
from fleet.launch import factories
from fleet.launch.builders import THINKER, gateway_channel, limit_threads, urgent_threads
from fleet.launch.process_specs import modules_by_role
from fleet.tools.policy_process import try_policy
from hal.driver_host.priority import idle, require_cores
from hal.driver_host.proxy import RobotProxy
from hal.driver_host.server import run_driver_server
from hal.driver_host.stop_line import ANSWER_S, send_order
from hal.driver_host.watchdog import CallDeadline
from hal.interfaces.robot import is_real
from hal.registry import make_operator, make_robot
from hal.safety.limits import compile_limits, slowed
from hal.safety.required import require_limits
from hal.safety.stop_latch import check_speed_limit
from hal.stop_devices.watch import Beside, check_devices, watched_devices
from policies.interface.policy import LearnedPolicy
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
    run_shadow,
    run_uplink,
    uplink_channel,
)
from robot_edge.runtime.robot_host import HOST, STOP_FILE, announce_host
from robot_edge.shadow.tap import ShadowTap
from robot_edge.uplink.relay_link import RelayLink
from robot_edge.uplink.server import Uplink
from robot_edge.uplink.spool import quota_bytes
from robot_edge.uplink.stop_link import OperatorInbox, StopLink
from robot_edge.uplink.stop_orders import StopOrders
from wire.clock import Clock, MonotonicClock
from wire.errors import ConfigError, suggest
from wire.identity.enrolment import join_fleet
from wire.identity.join_tokens import read_token
from wire.identity.sealing import Sealer
from wire.messages.gateway import OperatorCommand
from wire.transport.frame_ring import FrameRing, ring_path
from wire.transport.keys import GATEWAY, load_pair, load_public
from wire.transport.shared_channel import SharedChannel
from wire.transport.stop_connection import StopConnection
from wire.transport.zmq_channel import ZmqClient
from wire.types import Role

log = logging.getLogger(__name__)

KEYS = "keys"
"""who commands by a key beside the robot, and the channel on which the uplink hears it"""
RELAY = "relay"
"""the name of a site's relay"""
SHADOW = "shadow"
PARTS = ("robot", "control", "inference", SHADOW, "thinker", "uplink")
THINKING = frozenset(("inference", SHADOW, "thinker"))
"""those that run the policy"""


def edge_processes(options: EdgeOptions) -> EdgeProcesses:
    """One robot's processes, not started yet.

    Raises `ConfigError` for what none of them could start with: an unknown recipe, a missing key, a driver of another
    robot, a real robot without limits, a pedal that is not there, a core it may not run on.
    """
    config = options.config.resolve() if options.config is not None else None
    options = replace(options, keys=options.key_directory, data=options.root, config=config)
    recipe = options.overrides.applied(options.make_recipe())
    recipe.require_one_shape("a robot")
    # Fails here, in one line, rather than in each of the children.
    robot = make_robot(recipe.robot, recipe.robot_config)
    recipe.spec.require(robot.spec, f"robot '{recipe.robot}' for recipe '{recipe.name}'")
    require_limits(robot, recipe.loop.safety)
    check_speed_limit("--speed-limit", options.speed_limit)
    slowed(compile_limits(robot.spec, recipe.loop.safety), min(recipe.speed_limit, options.speed_limit))
    quota_bytes("--spool-max", options.spool_max)
    check_devices(watched_devices(recipe.stop_devices + options.stop_devices))
    require_cores(cpu_control=options.cpu_control, cpu_driver=options.cpu_driver)
    # Control sees the driver's process and not the driver, so it is told.
    rules = recipe.loop.episodes.settled(is_real(robot))
    resets, judges = ("person" if by else "robot" for by in (rules.reset_by_person, rules.judged_by_person))
    options = replace(options, overrides=replace(options.overrides, reset_by=resets, judged_by=judges))
    load_pair(options.key_directory, options.name)
    load_public(options.key_directory, GATEWAY)
    if options.think:
        load_public(options.key_directory, THINKER)
    if options.relay:
        load_public(options.key_directory, RELAY)
    if options.metrics_port:
        from wire.metrics import MetricsServer

        MetricsServer(options.metrics_host, options.metrics_port).close()
    parts = PARTS if recipe.think_apart and not options.think else [part for part in PARTS if part != "thinker"]
    arguments = options.arguments()
    commands = {part: [sys.executable, "-m", "fleet.cli", "edge-part", part, *arguments] for part in parts}
    logs = DataDirectory(options.root).logs
    return EdgeProcesses(options.name, commands, logs, THINKING if has_gpu() else frozenset())


def run_robot(options: EdgeOptions) -> None:
    """Run one robot: its driver, control, inference and uplink processes."""
    options = joined(options)
    edge, overrides = edge_processes(options), options.overrides
    # Whoever started this as one of many has tried it.
    if overrides.policy and PARENT not in os.environ:
        shutdown = ShutdownSignal()
        if not try_policy(options.recipe, overrides, 0, lambda: shutdown.requested, options.config):
            return
    preload(modules_by_role(overrides.applied(options.make_recipe()), overrides.policy)[Role.edge])
    run_edge(edge)


def joined(options: EdgeOptions) -> EdgeOptions:
    """`options` of a robot that has a key, which by a token in them it gets now. Raises `ConfigError`, `WireError`."""
    if not options.join:
        return options
    name = read_token(options.join).name
    if options.name not in (name, default(next(one for one in fields(options) if one.name == "name"))):
        raise ConfigError(f"--name {options.name}: the token of --join is for '{name}'. Leave --name out, or say that.")
    join_fleet(options.key_directory, options.join, options.gateway)
    return replace(options, name=name, join="")


def run_edge_part(options: EdgePartOptions) -> None:
    """One process of a robot; started by `edge`."""
    if options.part == SHADOW:
        options = replace(options, overrides=options.overrides.on_cpu())
    recipe, data = options.overrides.applied(options.make_recipe()), DataDirectory(options.root)
    options = replace(options, operator=options.operator and not recipe.people_only)
    name, run_directory, part = options.name, options.run_dir, options.part
    if part not in PARTS:
        raise ConfigError(f"a robot has no part '{part}'.{suggest(part, PARTS)} It has {', '.join(PARTS)}.")
    with instance_lock(data.edge(name) / f"{part}.lock"):
        match part:
            case "robot":
                _driver(recipe, data.edge(name), options)
            case "control":
                _control(recipe, data, options)
            case "inference":
                _inference(recipe, options)
            case "shadow":
                _shadow(recipe, options)
            case "thinker":
                _thinker(recipe, run_directory)
            case _:
                _uplink(recipe, data, options)


def _driver(recipe: Recipe, directory: Path, options: EdgePartOptions) -> None:
    run_directory = options.run_dir
    announce_host(run_directory, directory)
    robot = make_robot(recipe.robot, recipe.robot_config)
    require_limits(robot, recipe.loop.safety)
    operator = make_operator(recipe.robot, robot) if options.operator else None
    keys = uplink_channel(run_directory, KEYS)

    def say(command: str) -> None:
        now_ns = time.monotonic_ns()
        if not keys.send(OperatorCommand(options.name, command, (), now_ns, KEYS, "", now_ns, now_ns)):
            log.error("robot '%s': '%s' of a key went nowhere: no uplink listens.", options.name, command)

    beside = Beside(
        watched_devices(recipe.stop_devices + options.stop_devices),
        say,
        min(recipe.speed_limit, options.speed_limit),
    )
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
        beside=beside,
        cpu=options.cpu_driver,
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
        run_control(loop, uplink, recipe.tasks, flight, options.site, options.cpu_control)


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
    tap = ShadowTap(SharedChannel(run_directory / SHADOW, bind=True, polls=True, ring=ring))
    inference = Inference(
        name, policy, control, uplink, clock, standby=standby, slow=slow, config=recipe.slow, local=local, tap=tap
    )
    run_inference(inference, channels)
    inference.close()


def _shadow(recipe: Recipe, options: EdgePartOptions) -> None:
    from robot_edge.shadow.memory import end_first
    from robot_edge.shadow.runner import ShadowRunner

    # What acts has graphics cards, processors and memory before this process.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    idle()
    end_first()
    clock, name, run_directory = MonotonicClock(), options.name, options.run_dir
    inference = SharedChannel(run_directory / SHADOW, bind=False, ring=_frames(recipe, run_directory))
    uplink = uplink_channel(run_directory, SHADOW)
    channels: list[SharedChannel | ZmqClient] = [inference, uplink]
    remote = None
    if options.think:
        channels.append(server := ZmqClient(options.think, name, options.key_directory, THINKER))
        remote = RemoteSlowPath(server, clock, can_wait=True)

    def make() -> LearnedPolicy:
        limit_threads()
        return recipe.make_policy(recipe.spec, os.getpid())

    runner = ShadowRunner(name, make, uplink, inference, clock, remote)
    run_shadow(runner, *channels)
    runner.close()


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
    urgent_threads()
    name, run_directory = options.name, options.run_dir
    control = record_channel(run_directory, recipe.spec, uplink=True)
    inference = uplink_channel(run_directory, "inference", uplink=True)
    operator = uplink_channel(run_directory, "operator", uplink=True)
    keys = uplink_channel(run_directory, KEYS, uplink=True)
    clock = MonotonicClock()
    orders = StopOrders(name, lambda order: send_order(run_directory / HOST, order, ANSWER_S), clock)
    apart = StopConnection(options.gateway, lambda address: ZmqClient(address, name, options.key_directory), clock)
    inbox = OperatorInbox(operator)
    stops = StopLink(name, orders, apart, inbox)
    # Before a disk is touched: whoever stands beside the robot can stop it at once.
    stops.start()
    with contextlib.closing(stops), gateway_channel(options, name) as channel:
        quota = quota_bytes("--spool-max", options.spool_max)
        relay = relay_channel(options)
        site = RelayLink(name, relay, _sealer(options), clock, relay_text(options)) if relay is not None else None
        uplink = Uplink(
            name, data.edge(name), channel, control, inference, clock, stops=stops, spool_bytes=quota, relay=site
        )
        uplink.operator, uplink.keys = inbox, keys
        uplink.shadow.process = shadow = uplink_channel(run_directory, SHADOW, uplink=True)
        if options.metrics_port:
            _show_metrics(uplink, clock, options)
        run_uplink(uplink, channel, inference, inbox.socket, keys, shadow, *([relay] if relay is not None else []))
        if relay is not None:
            relay.close()


def relay_channel(options: EdgeOptions) -> ZmqClient | None:
    """The connection to the site's relay, None where there is none. Raises `ConfigError`."""
    return ZmqClient(options.relay, options.name, options.key_directory, RELAY) if options.relay else None


def relay_text(options: EdgeOptions) -> str:
    """What a person finds the site's relay by. Raises `ConfigError`."""
    return f"the relay at {options.relay} with key {load_public(options.key_directory, RELAY).decode()}"


def _sealer(options: EdgeOptions) -> Sealer:
    """Seals what goes by the relay, which is believed by nobody."""
    keys = options.key_directory
    return Sealer(load_pair(keys, options.name).secret, load_public(keys, GATEWAY))


def _show_metrics(uplink: Uplink, clock: Clock, options: EdgePartOptions) -> None:
    from robot_edge.uplink.metrics import UplinkMetrics
    from wire.metrics import MetricsServer

    try:
        MetricsServer(options.metrics_host, options.metrics_port, UplinkMetrics(uplink, clock))
    except ConfigError as error:
        # Somebody took the port since the edge began: what the robot records is worth more than figures about it.
        log.error("robot '%s': %s", options.name, error)
