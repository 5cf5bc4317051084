"""The main function of each process: build it, run its loop until asked to stop, put it away in order."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from fleet import supplies
from fleet.config import Recipe
from fleet.paths import DataDirectory
from fleet.recipes import get_recipe
from fleet.tuning import Tuning
from robot_edge.edge import lines, run_control, run_edge, run_inference, run_uplink
from robot_edge.process import Lifeline, only_one
from wire.clock import MonotonicClock, UnpacedClock
from wire.errors import ConfigError, Refused, nearest
from wire.keys import GATEWAY, load_pair, load_public
from wire.messages import Evaluate
from wire.zmq_channel import ZmqClient, ZmqPair, ZmqServer, wait_any

log = logging.getLogger(__name__)

PARTS = ("control", "inference", "uplink")
REFUSED_PATIENCE_S = 5.0
UNTUNED = Tuning()


def run_gateway(recipe_name: str, root: Path, host: str, port: int, web_host: str, web_port: int) -> None:
    """Serve until asked to stop."""
    from cloud_learner.operator.app import serve

    recipe, data = get_recipe(recipe_name), DataDirectory(root)
    lifeline = Lifeline()
    channel = ZmqServer(f"tcp://{host}:{port or '*'}", data.keys)
    gateway, view, ledger, sealer = supplies.make_gateway(recipe, data, channel)
    page = serve(view, web_host, web_port)
    if web_host not in ("127.0.0.1", "localhost", "::1"):
        log.warning("the page has no log-in: everybody who reaches %s can move robots.", page.url)
    log.info("robots connect to %s; the page is %s", channel.endpoint, page.url)
    sealer.start()
    try:
        while not lifeline.cut:
            wait_any([channel], 0.02)
            gateway.turn()
    finally:
        page.close()
        # Closing the page drops the links of those who held a robot: the robots must hear of it.
        gateway.turn()
        channel.close()
        sealer.stop()
        ledger.close()


def run_trainer(
    recipe_name: str, root: Path, gateway: str, keys: Path | None, seed: int, name: str, max_steps: int
) -> None:
    """Train until asked to stop, then write a checkpoint."""
    _one_thread()
    recipe, data = get_recipe(recipe_name, seed), DataDirectory(root)
    lifeline = Lifeline()
    with _line(gateway, name, keys or data.keys) as channel:
        while not data.buffer.exists() and not lifeline.cut:
            time.sleep(0.1)
        trainer = supplies.make_trainer(recipe, name, data, channel, seed, max_steps)
        patience = _Patience()
        while not (lifeline.cut or trainer.stopping):
            if not trainer.turn():
                wait_any([channel], 0.05)
            patience.check(trainer.refused, channel)
        if trainer.learner.gradient_steps:
            trainer.save()
        trainer.close()


def run_evaluator(
    recipe_name: str,
    root: Path,
    gateway: str,
    keys: Path | None,
    seed: int,
    name: str,
    version: int,
    label: str,
    tuning: Tuning = UNTUNED,
) -> None:
    """Measure versions until asked to stop, or one version once."""
    _one_thread()
    recipe, data = tuning.applied(get_recipe(recipe_name, seed)), DataDirectory(root)
    lifeline = Lifeline()
    config = recipe.evaluator
    only = Evaluate(version, config.final_episodes, config.final_first_seed, label) if version else None
    with _line(gateway, name, keys or data.keys) as channel:
        evaluator = supplies.make_evaluator(recipe, name, data, channel, seed, only)
        evaluator.robot.connect()
        patience = _Patience()
        try:
            while not (lifeline.cut or evaluator.done or evaluator.stopping):
                if not evaluator.busy:
                    wait_any([channel], 0.1)
                evaluator.turn()
                patience.check(evaluator.refused, channel)
        finally:
            evaluator.robot.close()


def run_demonstrator(
    recipe_name: str, root: Path, gateway: str, keys: Path | None, name: str, first_seed: int, episodes: int
) -> None:
    """Record the recipe's demonstrations and wait until they are safe."""
    from robot_edge.demonstrate import demonstrate
    from wire.memory_channel import memory_pair

    recipe, data = get_recipe(recipe_name), DataDirectory(root)
    count = episodes or recipe.demonstrations * len(recipe.tasks)
    clock = UnpacedClock()
    control_end, uplink_end = memory_pair()
    idle_end, unused_end = memory_pair()
    with _line(gateway, name, keys or data.keys) as channel:
        loop = supplies.make_demonstrator(recipe, name, control_end, idle_end, clock)
        uplink = supplies.make_uplink(name, data.edge(name), channel, uplink_end, unused_end)
        demonstrate(
            loop,
            uplink,
            control_end,
            uplink_end,
            recipe.tasks,
            count,
            first_seed,
            lambda: wait_any([channel], 0.02),
        )


def run_robot(
    recipe_name: str,
    root: Path,
    gateway: str,
    keys: Path | None,
    name: str,
    operator: bool,
    tuning: Tuning = UNTUNED,
) -> int:
    """Start and keep one robot's three processes."""
    get_recipe(recipe_name)
    data = DataDirectory(root)
    # Fails here, in one line, rather than in each of three children.
    load_pair(keys or data.keys, name)
    load_public(keys or data.keys, GATEWAY)
    common = ["--name", name, "--gateway", gateway, "--recipe", recipe_name, "--data", str(root)]
    common += ["--keys", str(keys or data.keys), "--operator" if operator else "--no-operator"]
    common += tuning.flags()
    commands = {part: [sys.executable, "-m", "fleet.cli", "edge-part", part, *common] for part in PARTS}
    return run_edge(name, commands, data.logs)


def run_edge_part(
    part: str,
    run_directory: Path,
    recipe_name: str,
    root: Path,
    gateway: str,
    keys: Path | None,
    name: str,
    operator: bool,
    tuning: Tuning = UNTUNED,
) -> None:
    """One of a robot's three processes."""
    recipe, data, ends = tuning.applied(get_recipe(recipe_name)), DataDirectory(root), lines(run_directory)
    if part not in PARTS:
        raise ConfigError(f"a robot has no part '{part}'.{nearest(part, PARTS)} It has {', '.join(PARTS)}.")
    with only_one(data.edge(name) / f"{part}.lock"):
        _run_part(part, recipe, data, ends, gateway, keys, name, operator)


def _run_part(
    part: str,
    recipe: Recipe,
    data: DataDirectory,
    ends: dict[str, str],
    gateway: str,
    keys: Path | None,
    name: str,
    operator: bool,
) -> None:
    if part == "control":
        uplink_line = ZmqPair(ends["uplink-control"], bind=False)
        inference_line = ZmqPair(ends["inference-control"], bind=False, queue=8)
        loop = supplies.make_control(recipe, name, uplink_line, inference_line, MonotonicClock(), operated=operator)
        run_control(loop, uplink_line, recipe.tasks)
        uplink_line.close()
        inference_line.close()
    elif part == "inference":
        _one_thread()
        run_inference_part(recipe, name, ends)
    else:
        control_line = ZmqPair(ends["uplink-control"], bind=True)
        inference_end = ZmqPair(ends["uplink-inference"], bind=True)
        with _line(gateway, name, keys or data.keys) as channel:
            uplink = supplies.make_uplink(name, data.edge(name), channel, control_line, inference_end)
            run_uplink(uplink, channel, control_line, inference_end)
        control_line.close()
        inference_end.close()


def run_inference_part(recipe: Recipe, name: str, ends: dict[str, str]) -> None:
    """The inference process of one robot."""
    from robot_edge.inference import Inference

    control = ZmqPair(ends["inference-control"], bind=True, queue=8)
    uplink = ZmqPair(ends["uplink-inference"], bind=False)
    policy = recipe.make_policy(recipe.spec, os.getpid())
    run_inference(Inference(name, policy, control, uplink, MonotonicClock()), control, uplink)
    control.close()
    uplink.close()


class _Patience:
    """Ends a process that the gateway goes on refusing, with the gateway's own words."""

    def __init__(self) -> None:
        self._since: float | None = None

    def check(self, refused: str, channel: ZmqClient) -> None:
        reason = refused or channel.refusal
        if not reason:
            self._since = None
            return
        self._since = self._since or time.monotonic()
        if time.monotonic() - self._since > REFUSED_PATIENCE_S:
            raise Refused(reason)


@contextlib.contextmanager
def _line(gateway: str, name: str, keys: Path) -> Iterator[ZmqClient]:
    channel = supplies.client(gateway, name, keys)
    try:
        yield channel
    finally:
        channel.close()


def _one_thread() -> None:
    """Several processes share a few cores: torch's thread pools would spin against each other."""
    try:
        import torch
    except ImportError as error:
        raise ConfigError("this process runs the policy and needs torch: install vla-fleet[learner] here.") from error
    torch.set_num_threads(1)
