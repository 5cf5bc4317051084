"""The command of each process: build it, run its loop until asked to stop, put it away in order."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from fleet.config.data_directory import DataDirectory
from fleet.config.overrides import read_staleness
from fleet.config.process_options import (
    ClientOptions,
    DemonstratorOptions,
    EvaluatorOptions,
    GatewayOptions,
    RelayOptions,
    ThinkServerOptions,
    TrainerOptions,
)
from fleet.config.recipe import Recipe
from fleet.launch import factories, learning
from fleet.launch.run_record import keep_record, make_record
from hal.driver_host.priority import idle
from hal.interfaces.robot import is_real
from hal.registry import make_robot
from robot_edge.runtime.lifecycle import ShutdownSignal
from wire.clock import MonotonicClock
from wire.errors import ConfigError, CorruptDataError, FormatError, InvalidDataError, NotWritableError, StorageError
from wire.messages.gateway import Evaluate
from wire.transport.keys import GATEWAY, load_pair
from wire.transport.zmq_channel import ZmqClient, ZmqServer, wait_any

log = logging.getLogger(__name__)
Made = TypeVar("Made")

THINKER = "thinker"
"""name and key of a think server"""


def run_gateway(options: GatewayOptions) -> None:
    """Run the gateway: ingest, buffer, weight server and the operator page."""
    from cloud_learner.gateway.stop_server import StopServer
    from cloud_learner.operator.app import serve

    urgent_threads()
    recipe = options.resolved(options.overrides.set_in(options.make_recipe()))
    data = DataDirectory(options.root)
    data.keep_buffer_at(options.ledger, options.store, options.gateway_name)
    allow_connections()
    shutdown = ShutdownSignal()
    channel = ZmqServer(f"tcp://{options.host}:{options.port or '*'}", data.keys, apart=True, enrols=True)
    secret = load_pair(data.keys, GATEWAY).secret
    heard = ZmqServer(
        f"tcp://{options.host}:{options.heard_stop_port or '*'}", data.keys, apart=True, option="--stop-port"
    )
    stops = StopServer(heard, MonotonicClock(), int(heard.endpoint.rpartition(":")[2]))
    # before a database is waited for: a stop needs none
    stops.start()
    with contextlib.ExitStack() as undo:
        undo.callback(channel.close)
        undo.callback(stops.close)
        made = wait_for_buffer(
            lambda: factories.make_gateway(recipe, data, channel, stops=stops, secret=secret),
            lambda: shutdown.requested,
        )
        if made is None:
            return
        undo.pop_all()
    gateway, view, ledger, maintenance = made
    page = serve(view, options.web_host, options.web_port, stop=stops.give, metrics=gateway.metrics.text)
    if options.web_host not in ("127.0.0.1", "localhost", "::1"):
        log.warning("the page has no log-in: everybody who reaches %s can move robots.", page.url)
    data.note_gateway(channel.endpoint.replace("//0.0.0.0:", "//127.0.0.1:"))
    log.info("robots connect to %s, for stops to port %d; the page is %s", channel.endpoint, stops.port, page.url)
    gateway.start()
    maintenance.start()
    # What is there stays: to look through it for garbage would keep people waiting for a tenth of a second.
    gc.collect()
    gc.freeze()
    try:
        while not shutdown.requested:
            wait_any([channel, gateway.wakeup.fd], 0.02)
            gateway.poll()
    finally:
        page.close()
        # Closing the page drops the links of those who held a robot: the robots must hear of it.
        gateway.close()
        stops.close()
        channel.close()
        maintenance.stop()
        ledger.close()


def run_trainer(options: TrainerOptions) -> None:
    """Train on the buffer in DATA and publish versions to the gateway."""
    limit_threads()
    recipe = options.make_recipe(options.seed)
    overrides = options.overrides.with_needs_of(recipe)
    recipe = overrides.applied(recipe)
    recipe = replace(recipe, staleness=read_staleness(options.max_lag, recipe.staleness))
    data = DataDirectory(options.root)
    shutdown = ShutdownSignal()
    from cloud_learner.training.reporting.run_log import RunLog

    with gateway_channel(options, options.name) as channel:
        trainer = wait_for_buffer(
            lambda: learning.make_trainer(
                recipe, options.name, data, channel, options.seed, options.max_steps, snapshot=options.snapshot
            ),
            lambda: shutdown.requested,
        )
        if trainer is None:
            return
        record = make_record(
            "trainer",
            recipe,
            options.seed,
            overrides.choice(),
            overrides.set_,
            snapshot=options.snapshot,
            steps=options.max_steps,
        )
        try:
            keep_record(data, record)
        except StorageError as error:
            log.warning("%s Learning goes on without that note.", error)
        if options.metrics_port:
            from cloud_learner.training.reporting.metrics import TrainerMetrics
            from wire.metrics import MetricsServer

            MetricsServer(options.metrics_host, options.metrics_port, TrainerMetrics(trainer, MonotonicClock()))
        curves = RunLog.open(data.curves, f"{recipe.name} {data.root.name}", trainer.learner.gradient_steps, {})
        trainer.start()
        while not (shutdown.requested or trainer.stopping):
            if not trainer.step():
                wait_any([channel], 0.05)
            curves.poll(trainer.counts)
            trainer.session.raise_if_rejected()
        curves.close()
        if trainer.learner.gradient_steps:
            trainer.save()
        trainer.close()


def run_evaluator(options: EvaluatorOptions) -> None:
    """Measure versions on held-out seeds."""
    idle()
    limit_threads()
    recipe = simulated(options.overrides.applied(options.make_recipe(options.seed)))
    data, version = DataDirectory(options.root), options.version
    shutdown = ShutdownSignal()
    config = recipe.evaluator
    only = Evaluate(version, config.final_episodes, config.final_first_seed, options.label) if version else None
    with gateway_channel(options, options.name) as channel:
        evaluator = factories.make_evaluator(recipe, options.name, data, channel, options.seed, only)
        with contextlib.ExitStack() as held:
            for one in evaluator.robots:
                held.callback(one.robot.close)
                one.robot.connect()
            while not (shutdown.requested or evaluator.done or evaluator.subscriber.stopping):
                if not evaluator.busy:
                    wait_any([channel], 0.1)
                evaluator.step()
                evaluator.subscriber.session.raise_if_rejected()


def run_demonstrator(options: DemonstratorOptions) -> None:
    """Record demonstrations of the scripted operator and send them to the gateway."""
    from fleet.evaluation.demonstrations import demonstrate

    recipe, data = options.overrides.set_in(options.make_recipe()), DataDirectory(options.root)
    recipe.require_one_shape("a demonstration")
    recipe = simulated(recipe)
    count = options.episodes or recipe.demonstrations * len(recipe.tasks)
    name = options.name
    with gateway_channel(options, name) as channel:
        demonstrate(
            recipe, name, data.edge(name), channel, count, options.first_seed, lambda: wait_any([channel], 0.02)
        )


def simulated(recipe: Recipe) -> Recipe:
    """`recipe`. Raises `ConfigError` for one, or a member, without a simulator to demonstrate and to evaluate in:
    whoever does that keeps no pace, and nobody could stop it.
    """
    for member in recipe.members.values():
        simulated(member)
    if recipe.people_only:
        raise ConfigError(f"recipe '{recipe.name}' has no simulator: people demonstrate on its robots and judge them.")
    with contextlib.closing(make_robot(recipe.robot, recipe.unpaced_config)) as robot:
        if is_real(robot):
            raise ConfigError(
                f"recipe '{recipe.name}' would drive the real robot '{recipe.robot}' as fast as this machine can, "
                "without a host that stops it, to demonstrate and to evaluate. Give it the `unpaced_config` of a "
                "simulator, or `people_only`: then people demonstrate and judge, on robots that `vla-fleet edge` runs."
            )
    return recipe


def run_think_server(options: ThinkServerOptions) -> None:
    """Run the slow path for robots elsewhere: `edge --think tcp://HOST:PORT`. Its key is called `thinker`."""
    from robot_edge.inference.latent_server import LatentEncoder, LatentServer

    limit_threads()
    recipe, data = options.overrides.applied(options.make_recipe()), DataDirectory(options.root)
    recipe.require_one_shape("a think server")
    shutdown = ShutdownSignal()
    # A robot's shadow connects by the robot's key.
    robots = ZmqServer(f"tcp://{options.host}:{options.port or '*'}", options.key_directory, THINKER, apart=True)
    with gateway_channel(options, THINKER) as channel:
        encoder = LatentEncoder(lambda: recipe.make_policy(recipe.spec, os.getpid()), options.versions)
        server = LatentServer(THINKER, robots, channel, encoder, data.edge(THINKER) / "weights", MonotonicClock())
        log.info("robots that think here connect to %s", robots.endpoint)
        while not (shutdown.requested or server.subscriber.stopping):
            wait_any([robots, channel], 0.1)
            server.poll()
            server.subscriber.session.raise_if_rejected()
    robots.close()


def run_relay(options: RelayOptions) -> None:
    """Stand between a site's robots (`edge --relay tcp://HOST:PORT`) and the gateway: the uplink carries each chunk of
    weights once, and what robots record waits here while it is down."""
    from robot_edge.relay.server import SiteRelay
    from robot_edge.relay.upload_spool import UploadSpool
    from robot_edge.uplink.spool import quota_bytes

    shutdown = ShutdownSignal()
    spool = None
    if options.uploads:
        place = DataDirectory(options.root).edge(options.name) / "uploads.sqlite"
        cameras = [camera for camera in options.hold_cameras.split(",") if camera]
        spool = UploadSpool(place, quota_bytes("--spool-max", options.spool_max), cameras)
    with (
        contextlib.closing(
            ZmqServer(f"tcp://{options.host}:{options.port or '*'}", options.key_directory, options.name)
        ) as robots,
        gateway_channel(options, options.name) as channel,
    ):
        relay = SiteRelay(options.name, robots, channel, MonotonicClock(), options.cache_mb * 1_000_000, spool)
        relay.start()
        log.info("robots of this site connect to %s", robots.endpoint)
        while not (shutdown.requested or relay.stopping):
            wait_any([robots, channel, relay.wakeup.fd], 0.1)
            relay.poll()
            relay.session.raise_if_rejected()
        log.info("%s", relay.progress())
        relay.close()


def gateway_channel(options: ClientOptions, name: str) -> contextlib.AbstractContextManager[ZmqClient]:
    """The connection of the process called `name` to its gateway, closed in the end."""
    return contextlib.closing(ZmqClient(options.gateway, name, options.key_directory))


def wait_for_buffer(make: Callable[[], Made], ended: Callable[[], bool]) -> Made | None:
    """What `make` returns once the buffer that it opens can be read; None when this process is to end before.

    Why it waits is said once, and again when the reason changes. Raises what waiting does not mend: a buffer of
    another format, a damaged one, one that may not be read or lacks what was asked for.
    """
    from cloud_learner.training.retry import RetryPause

    lasting = (FormatError, CorruptDataError, NotWritableError, InvalidDataError)
    pause = RetryPause("waiting for the buffer", MonotonicClock(), longest_s=1.0, lasting=lasting)
    while not ended():
        if not pause.due:
            time.sleep(0.02)
            continue
        with pause:
            return make()
    return None


def urgent_threads() -> None:
    """A stop wakes threads one after the other, and each waits so long for a busy one to let go of the interpreter."""
    sys.setswitchinterval(0.0005)


def allow_connections() -> None:
    """Each robot has two connections: open as many as this process may, not as many as it usually may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def limit_threads(count: int = 1) -> None:
    """Several processes share a few cores: torch's thread pools would spin against each other."""
    try:
        import torch
    except ImportError as error:
        raise ConfigError("this process runs the policy and needs torch: install vla-fleet[learner] here.") from error
    torch.set_num_threads(count)
