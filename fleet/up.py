"""`vla-fleet up`: the whole loop on one machine, each part a process of its own, watched and ended in order."""

from __future__ import annotations

import json
import logging
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from cloud_learner.buffer.ledger.ledger import Ledger
from fleet.config import Recipe
from fleet.meters import Meters
from fleet.paths import DataDirectory, Identity
from fleet.processes import THINKER
from fleet.recipes import get_recipe
from fleet.report import write_report
from fleet.table import Screen
from fleet.tuning import Tuning
from robot_edge.edge import DRAIN_S
from robot_edge.supervisor import Child, Supervisor
from wire.errors import ConfigError, FleetError
from wire.keys import GATEWAY, make_keys

log = logging.getLogger(__name__)

START_PATIENCE_S = 60.0
FINAL_EVALUATION_S = 900.0


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asked for."""

    recipe: str
    robots: int
    minutes: float | None
    data: Path | None
    seed: int
    headless: bool
    report: Path | None
    port: int
    web_port: int
    web_host: str
    operator: bool
    ledger: str = ""
    store: str = ""
    tuning: Tuning = field(default_factory=Tuning)


class Stopped(Exception):
    """Somebody asked to stop: not an error."""


class Up:
    """One run of the main job."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.recipe: Recipe = get_recipe(options.recipe, options.seed)
        self.data = DataDirectory((options.data or Path("data") / self.recipe.name.replace(":", ".")).resolve())
        self.robots = [f"robot-{number}" for number in range(options.robots)]
        self.meters = Meters()
        self._asked = 0

    def run(self) -> int:
        """Everything from the checks to the report; the exit status."""
        options = self.options
        if options.report is not None and not options.report.resolve().parent.is_dir():
            raise ConfigError(f"--report {options.report}: its directory does not exist; create it first.")
        identity = Identity(self.recipe.name, options.seed, self.recipe.spec.hash)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)
        with self.data.prepare(identity):
            self.data.keep_buffer_at(options.ledger, options.store)
            port = _free_port(options.port, "127.0.0.1", "--port")
            web_port = _free_port(options.web_port, options.web_host, "--web-port")
            helpers = [GATEWAY, THINKER, "trainer", "evaluator", "evaluator-before", "evaluator-after", "demonstrator"]
            make_keys(self.data.keys, [*helpers, *self.robots])
            self.gateway = f"tcp://127.0.0.1:{port}"
            shown = "127.0.0.1" if options.web_host in ("", "0.0.0.0", "::") else options.web_host
            self.page = f"http://{shown}:{web_port}"
            self.children = Supervisor(self._children(port, web_port))
            self.screen = Screen(self.page, self.recipe, self.data.root, headless=options.headless)
            started = time.monotonic()
            status = 0
            try:
                self._work()
            except Stopped:
                self.screen.say("stopping: robots finish their record, spools drain, the trainer saves …")
            except FleetError as error:
                self.screen.close()
                sys.stderr.write(f"vla-fleet: {error}\n")
                status = 1
            finally:
                self._finish()
                self.screen.close()
            if options.report is not None and status == 0:
                write_report(options.report, self.data, self.recipe, self.meters, time.monotonic() - started)
                self.screen.say(f"report: {options.report}")
            return status

    # --- phases ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        self._start("gateway")
        self._await_page()
        missing = self.recipe.demonstrations * len(self.recipe.tasks) - self._demonstrations()
        if missing > 0:
            self.children.children["demonstrator"].command += ["--episodes", str(missing)]
            self.screen.say(f"recording {self.recipe.demonstrations} demonstrations of each task …")
            self._run_to_end("demonstrator", 300.0)
        for name in ("trainer", "evaluator", *self.robots):
            self._start(name)
        self.screen.say(f"the page is {self.page}; Ctrl-C stops everything")
        self._await_first_version()
        deadline = time.monotonic() + 60 * self.options.minutes if self.options.minutes is not None else None
        while deadline is None or time.monotonic() < deadline:
            self._rest(0.5, deadline)
        if self.options.report is not None:
            self._measure()

    def _demonstrations(self) -> int:
        """Finished demonstrations in the buffer."""
        ledger = Ledger.open(self.data.buffer.ledger_place, read_only=True)
        try:
            episodes = ledger.episodes("demonstrator", limit=1_000_000)
        finally:
            ledger.close()
        return sum(episode.outcome != "" for episode in episodes)

    def _measure(self) -> None:
        """Robots and trainer end, then the first and the newest version are measured with the machine to themselves."""
        self.screen.say("time is up: robots stop, then the first and the newest version are measured …")
        self._stop_robots()
        self.children.stop(["trainer", "evaluator"], 20.0)
        newest = self.snapshot()["version"]
        if newest is None:
            return
        for name, number in (("evaluator-before", 1), ("evaluator-after", newest["number"])):
            child = self.children.children[name]
            child.command += ["--version", str(number), "--label", name.removeprefix("evaluator-")]
            self._start(name)
        deadline = time.monotonic() + FINAL_EVALUATION_S
        while any(self.children.children[f"evaluator-{label}"].running for label in ("before", "after")):
            self._rest(0.5, None)
            if time.monotonic() > deadline:
                raise FleetError(f"the final evaluation took more than {FINAL_EVALUATION_S:.0f} s and was given up.")

    def _finish(self) -> None:
        self._stop_robots()
        helpers = ["trainer", "evaluator", "evaluator-before", "evaluator-after", "demonstrator"]
        self.children.stop(helpers, 20.0)
        self.children.stop(["gateway"], 10.0)

    def _stop_robots(self) -> None:
        self.children.stop(self.robots, 2 * DRAIN_S + 10.0)
        self._look()

    # --- children -------------------------------------------------------------------------------------------------

    def _children(self, port: int, web_port: int) -> list[Child]:
        options, data = self.options, self.data
        common = ["--recipe", self.recipe.name, "--data", str(data.root)]
        remote = [*common, "--gateway", self.gateway]
        seeded = [*remote, "--seed", str(options.seed)]
        operated = "--operator" if options.operator else "--no-operator"

        def child(name: str, command: list[str], nice: int = 0, restart: bool = True) -> Child:
            full = [sys.executable, "-m", "fleet.cli", *command]
            return Child(name, full, data.logs / f"{name}.log", nice=nice, restart=restart)

        tuned = options.tuning.flags()
        web = ["--web-port", str(web_port), "--web-host", options.web_host]
        return [
            child("gateway", ["gateway", *common, "--port", str(port), *web]),
            child("trainer", ["trainer", *seeded], nice=5),
            child("evaluator", ["evaluator", *seeded, *tuned], nice=15),
            child("demonstrator", ["demonstrate", *remote], restart=False),
            child("evaluator-before", ["evaluator", *seeded, *tuned, "--name", "evaluator-before"], restart=False),
            child("evaluator-after", ["evaluator", *seeded, *tuned, "--name", "evaluator-after"], restart=False),
            *(child(robot, ["edge", *remote, *tuned, "--name", robot, operated]) for robot in self.robots),
        ]

    def _start(self, name: str) -> None:
        self.children.start(name)

    def _run_to_end(self, name: str, limit_s: float) -> None:
        self._start(name)
        deadline = time.monotonic() + limit_s
        while self.children.children[name].running:
            self._rest(0.2, None)
            if time.monotonic() > deadline:
                raise FleetError(f"{name} did not end within {limit_s:.0f} s; see {self.data.logs / name}.log.")
        self._rest(0.0, None)

    # --- watching -------------------------------------------------------------------------------------------------

    def _rest(self, seconds: float, deadline: float | None) -> None:
        """Wait a little, keep the children running and the screen fresh."""
        until = time.monotonic() + seconds
        if deadline is not None:
            until = min(until, deadline)
        while True:
            if self._asked:
                raise Stopped
            self.children.turn()
            for child in self.children.children.values():
                if child.failed and child.name not in self.robots:
                    raise FleetError(child.failed)
            remaining = until - time.monotonic()
            if remaining <= 0:
                break
            time.sleep(min(0.1, remaining))
        self._look()

    def _look(self) -> None:
        try:
            snapshot = self.snapshot()
        except (OSError, urllib.error.URLError, json.JSONDecodeError) as error:
            log.debug("no snapshot: %s", error)
            return
        self.meters.take(snapshot)
        self.screen.show(snapshot, self.children)

    def snapshot(self) -> dict[str, Any]:
        """What the page shows, from the gateway. Raises `OSError` when it does not answer."""
        with urllib.request.urlopen(f"{self.page}/api/fleet", timeout=5.0) as answer:
            return json.load(answer)

    def _await_page(self) -> None:
        deadline = time.monotonic() + START_PATIENCE_S
        while True:
            try:
                self.snapshot()
                return
            except (OSError, urllib.error.URLError) as error:
                if time.monotonic() > deadline:
                    raise FleetError(
                        f"the gateway did not answer within {START_PATIENCE_S:.0f} s ({error}); "
                        f"see {self.data.logs / 'gateway.log'}."
                    ) from error
            self._rest(0.1, None)

    def _await_first_version(self) -> None:
        self.screen.say("pretraining on the demonstrations …")
        while True:
            try:
                if self.snapshot()["version"] is not None:
                    return
            except (OSError, urllib.error.URLError) as error:
                log.debug("no snapshot: %s", error)
            self._rest(0.5, None)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked += 1


def run_up(options: Options) -> int:
    """Run the main job; the exit status."""
    return Up(options).run()


def _free_port(port: int, host: str, option: str) -> int:
    """`port` if it is free, any free one for 0. Raises `ConfigError` that names the option to change."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} on {host} cannot be used: {error.strerror}. Stop the program that uses it or choose "
                f"another with {option} (0 takes a free one)."
            ) from error
        return probe.getsockname()[1]
