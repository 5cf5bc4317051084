"""`vla-fleet up`: the whole loop, each part a process of its own, watched and ended in order."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

from fleet.config.data_directory import DataDirectory, RunIdentity
from fleet.config.process_options import UpOptions
from fleet.config.recipe import Recipe
from fleet.launch.backend import EVERYWHERE, Backend, LocalBackend, free_port
from fleet.launch.builders import THINKER, simulated
from fleet.launch.dashboard import Dashboard
from fleet.launch.process_specs import (
    AFTER,
    BEFORE,
    HELPERS,
    ProcessSpecs,
    demonstrator,
    measurer,
    minute_label,
    modules_by_role,
)
from fleet.launch.robot_names import member_of_robot, members_here, robot_names
from fleet.launch.run_record import keep_record, make_record
from fleet.launch.template import Template
from fleet.tools.policy_process import build_policy, try_policy
from fleet.tools.report import RunCounters, make_report, write_report
from robot_edge.runtime.process_group import DRAIN_S
from robot_edge.runtime.rejection_log import RejectionLog
from wire.errors import ConfigError, FleetError
from wire.transport.keys import GATEWAY, Teaching, make_keys
from wire.types import CALLERS

log = logging.getLogger(__name__)

START_S = 60.0
DEMONSTRATIONS_S = 300.0
FINAL_EVALUATION_S = 900.0


class StopRequestedError(Exception):
    """Somebody asked to stop: not an error."""


class Up:
    """One run of the main job."""

    def __init__(self, options: UpOptions) -> None:
        options.check()
        self.options = options
        self.recipe: Recipe = options.make_recipe(options.seed)
        self.overrides = options.overrides.with_needs_of(self.recipe)
        # What cannot work is said here, once, rather than by every part.
        self.recipe = self.overrides.set_in(self.recipe) if self._builds else self.overrides.applied(self.recipe)
        self._names = robot_names(self.recipe, options.robots)
        """of the simulated robots of this machine"""
        shown = members_here(self.recipe, () if options.ray_address else self._names)
        self._demonstrators = {demonstrator(name): (name, one) for name, one in shown.items()}
        """by their names: member and its recipe"""
        if options.think_server:
            self.recipe.require_one_shape("a think server")
        self.data = DataDirectory(options.root.resolve())
        self.counters = RunCounters()
        self._refusals = RejectionLog()
        self._robots: dict[str, str] = {}
        self._edges: list[str] = []
        self._think = ""
        self._stops_requested = 0
        self._newest_version = 0
        self._at_minute: dict[float, int] = {}

    def run(self) -> int:
        """Everything from the checks to the report; the exit status."""
        options = self.options
        if options.report is not None and not options.report.resolve().parent.is_dir():
            raise ConfigError(f"--report {options.report}: its directory does not exist; create it first.")
        self._check_people_only()
        config, identity = self.recipe.config, RunIdentity.of(self.recipe, options.seed, self.overrides.choice())
        self._handle_signals()
        self.data.require(identity)
        # Before the directory is given to this policy for ever. With Ray other machines make it.
        tried = (self.overrides.policy or self.overrides.algorithm) and options.backend == "local"
        stopped = lambda: bool(self._stops_requested)  # noqa: E731
        if tried and not try_policy(options.recipe, self.overrides, options.seed, stopped, config):
            return 0
        with self.data.prepare(identity):
            self.data.keep_buffer_at(options.ledger, options.store)
            recipe, choice = options.resolved(self.recipe), self.overrides.choice()
            keep_record(self.data, make_record("up", recipe, options.seed, choice, self.overrides.set_))
            make_keys(self.data.keys, [GATEWAY, *HELPERS, *self._demonstrators, *self._measurers, *CALLERS])
            with self._backend() as (self.backend, reached):
                # Ray puts its own handlers there.
                self._handle_signals()
                host = options.host or reached
                port = free_port(options.port, host, "--port")
                web_port = free_port(options.web_port, options.web_host, "--web-port")
                address = f"tcp://{reached if host in EVERYWHERE else host}:{port}"
                operator = options.operator and not self.recipe.people_only
                name = self.recipe.name
                self.parts = ProcessSpecs(name, address, options.seed, operator, self.overrides, config)
                shown = "127.0.0.1" if options.web_host in ("", *EVERYWHERE) else options.web_host
                self.page = f"http://{shown}:{web_port}"
                self.dashboard = Dashboard(self.page, self.recipe, self.data.root, headless=options.headless)
                return self._watched(lambda: self._work(host, port, web_port))

    def _watched(self, work: Callable[[], None]) -> int:
        """`work`, its end, and the report; the exit status."""
        started, status = time.monotonic(), 0
        try:
            work()
        except StopRequestedError:
            self.dashboard.say("stopping: robots finish their record, spools drain, the trainer saves …")
        except FleetError as error:
            self.dashboard.close()
            sys.stderr.write(f"vla-fleet: {error}\n")
            status = 1
        finally:
            self._finish()
            self.dashboard.close()
        if self.options.report is not None and status == 0:
            duration_s = time.monotonic() - started
            found = self.recipe, self.counters, duration_s, self._remote_steps(), self.options.measure_at
            write_report(self.options.report, make_report(self.data, *found))
            self.dashboard.say(f"report: {self.options.report}")
        return status

    @contextlib.contextmanager
    def _backend(self) -> Iterator[tuple[Backend, str]]:
        """Where parts run, and the address of this machine as they reach it."""
        options, data, simulated = self.options, self.data, self._names
        if options.backend == "local":
            with Template(modules_by_role(self.recipe, self.overrides.policy), data.logs / "template.log") as template:
                yield LocalBackend(data.root, data.logs, simulated, start=template.starter), "127.0.0.1"
            return
        from fleet.ray_backend.backend import RayBackend
        from fleet.ray_backend.cluster import connected

        with connected(options.ray_address, simulated, data.logs / "ray.log") as cluster:
            yield RayBackend(cluster, data.root, LocalBackend(data.root, data.logs)), cluster.address

    # --- phases ---------------------------------------------------------------------------------------------------

    @property
    def _builds(self) -> bool:
        """Whether the policy is a tiny one that this job builds."""
        return bool(self.recipe.tiny) and not self.overrides.policy

    def _work(self, host: str, port: int, web_port: int) -> None:
        options = self.options
        web_host, retention, stop_port = options.web_host, options.retention, options.heard_stop_port
        if stop_port:
            free_port(stop_port, host, "--stop-port")
        self.backend.start(
            self.parts.make_gateway(
                host, port, web_host, web_port, retention, stop_port, options.canary, options.gate_success
            )
        )
        late = f"the gateway did not answer within {START_S:.0f} s; see {self.data.logs / 'gateway.log'}."
        self._wait_until(self._refresh, START_S, late)
        if self.recipe.people_only:
            self.dashboard.say(f"robots wait for a person: {self._how_to_drive()}")
        else:
            self._demonstrate()
        if self._builds:
            self._build_policy()
        self.backend.start(self.parts.make_trainer(self.options.max_lag))
        if self.options.think_server:
            self.backend.start(self.parts.make_thinker())
        if not self.recipe.people_only:
            self.backend.start(self.parts.make_evaluator())
        self.dashboard.say(f"the page is {self.page}; Ctrl-C stops everything")
        count = f"{self.recipe.demonstrations} of each task"
        self.dashboard.say(
            f"learning begins after {count} …" if self.recipe.people_only else "pretraining on the demonstrations …"
        )
        while not self._newest_version:
            self._start_new_edges()
            self._wait(0.5)
        started = time.monotonic()
        deadline = math.inf if self.options.minutes is None else started + 60 * self.options.minutes
        while (left := deadline - time.monotonic()) > 0:
            self._start_new_edges()
            self._wait(min(0.5, left))
            self._note_versions((time.monotonic() - started) / 60)
        if self.options.report is not None:
            self._measure()

    def _note_versions(self, minutes: float) -> None:
        """Remember the newest version of the minutes that are to be measured, so many having passed."""
        for minute in self.options.measure_at:
            if minute <= minutes and self._newest_version:
                self._at_minute.setdefault(minute, self._newest_version)

    def _check_people_only(self) -> None:
        """Raises `ConfigError` for what lacks a simulator, or another robot than the one on the bench."""
        if not self.recipe.people_only:
            # With Ray other machines make it, and say so.
            if self.options.backend == "local":
                simulated(self.recipe)
            return
        if self.options.report is not None:
            raise ConfigError(f"--report: recipe '{self.recipe.name}' has no simulator to measure versions in.")
        if len(self._names) > 1 or self.options.backend != "local":
            raise ConfigError(
                f"--config {self.recipe.config} describes one robot, which this computer runs. Start every other one "
                "where it is: `vla-fleet edge --name NAME --config FILE.toml`."
            )

    @property
    def _teaches(self) -> tuple[Teaching, ...]:
        """What the fleet's own robots may say by their own word: people stand beside a real one."""
        if self.recipe.people_only:
            return (Teaching.beside,)
        return (Teaching.script,) if self.options.operator else ()

    def _how_to_drive(self) -> str:
        recipe = f"--recipe {self.recipe.name} --config {self.recipe.config}"
        return f"vla-fleet teleop robot-0 {recipe} --data {self.data.root}"

    @property
    def _measurers(self) -> list[str]:
        """Parts that measure one version each, at the end."""
        labels = [BEFORE, *map(minute_label, self.options.measure_at), AFTER]
        return [measurer(label) for label in labels]

    def _build_policy(self) -> None:
        """Give every part the recipe's tiny policy; the first time it is built."""
        path, kind = self.data.policy, self.recipe.tiny
        if not path.exists():
            self.dashboard.say(f"building a tiny {kind} in {path} …")
            build_policy(kind, self.data, self.recipe.name, self.options.seed, lambda: self._wait(0.2))
        self.overrides = replace(self.overrides, policy=f"lerobot:{path}")
        self.recipe = self.overrides.applied(self.recipe)
        self.parts = replace(self.parts, overrides=self.overrides)

    def _start_new_edges(self) -> None:
        """Start the edges of robots that have joined since the last time."""
        if self.options.think_server and not self._found_think_server():
            return
        # One that is on another node now has neither joined nor left.
        before, now = self._robots, dict(self.backend.robots())
        self._robots = now
        for name in sorted(now.keys() - before.keys()):
            try:
                member = member_of_robot(self.recipe, name)
            except ConfigError as error:
                self.dashboard.say(str(error))
                continue
            if name not in self._edges:
                make_keys(self.data.keys, [name], teaches=self._teaches)
                self._edges.append(name)
                self.backend.start(self.parts.make_edge(name, self._think, member))
            if now[name]:
                self.dashboard.say(f"{name} is there, on {now[name]}")
        for name in sorted(before.keys() - now.keys()):
            self.dashboard.say(f"{name} is lost: its node has gone. It works again when the node is back.")

    def _found_think_server(self) -> bool:
        """Whether robots know where to think. They start again when the think server had to move."""
        address = self.backend.parts[THINKER].address
        if address and self._think and address != self._think:
            self.dashboard.say(f"the think server is at {address} now: robots start again")
            self.backend.stop(self._edges, DRAIN_S)
            for name in self._edges:
                self.backend.start(self.parts.make_edge(name, address))
        self._think = address or self._think
        return bool(self._think)

    def _demonstrate(self) -> None:
        """Have recorded what is missing of the demonstrations."""
        started = []
        for name, (member, recipe) in self._demonstrators.items():
            missing = recipe.demonstrations * len(recipe.tasks) - self._demonstrations(name)
            if missing > 0:
                whose = f" by {member}" if member else ""
                self.dashboard.say(f"recording {recipe.demonstrations} demonstrations of each task{whose} …")
                self.backend.start(self.parts.make_demonstrator(missing, member))
                started.append(name)
        for name in started:
            late = f"{name} did not end within {DEMONSTRATIONS_S:.0f} s; see {self.data.logs / name}.log."
            self._wait_until(partial(self._ended, name), DEMONSTRATIONS_S, late)

    def _demonstrations(self, name: str) -> int:
        """Finished demonstrations of a demonstrator in the buffer."""
        with self.data.open_buffer() as (ledger, _store):
            return sum(episode.outcome != "" for episode in ledger.episodes(name, limit=1_000_000))

    def _measure(self) -> None:
        """Robots and trainer end, then versions are measured with the machine to themselves: the first, those of
        `measure_at`, and the newest. Their scenes are the same."""
        self.dashboard.say("time is up: robots stop, then the first and the newest version are measured …")
        self._stop_robots()
        self.backend.stop(list(HELPERS), 20.0)
        newest = self.snapshot()["version"]
        if newest is None:
            return
        wanted = {BEFORE: 1, AFTER: newest["number"]}
        wanted |= {minute_label(minute): number for minute, number in self._at_minute.items()}
        for label, number in wanted.items():
            self.backend.start(self.parts.make_measurer(label, number))
        late = f"the final evaluation took more than {FINAL_EVALUATION_S:.0f} s and was given up."
        # One that cannot be measured is passed over; its measurer has said why.
        parts, names = self.backend.parts, [measurer(label) for label in wanted]
        done = lambda: all(parts[name].failed or self._ended(name) for name in names)  # noqa: E731
        self._wait_until(done, FINAL_EVALUATION_S, late)

    def _finish(self) -> None:
        self._stop_robots()
        self.backend.stop([*HELPERS, *self._demonstrators, *self._measurers], 20.0)
        self.backend.stop(["gateway"], 10.0)

    def _stop_robots(self) -> None:
        self.backend.stop(self._edges, 2 * DRAIN_S + 10.0)
        self._refresh()

    def _ended(self, name: str) -> bool:
        """Whether a part that runs once has done so."""
        state = self.backend.parts[name]
        return state.starts > 0 and not state.running and not state.fault

    def _remote_steps(self) -> dict[str, int]:
        """What robots of other machines said they recorded, in steps."""
        said = {name: self.backend.parts[name].steps_recorded for name in self._edges}
        return {name: steps for name, steps in said.items() if steps is not None}

    # --- watching -------------------------------------------------------------------------------------------------

    def _wait_until(self, done: Callable[[], object], limit_s: float, late: str) -> None:
        """Rest until `done`. Raises `FleetError` that says `late` after `limit_s`."""
        deadline = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > deadline:
                raise FleetError(late)
            self._wait(0.2)
        self._wait(0.0)

    def _wait(self, seconds: float) -> None:
        """Wait a little, keep the children running and the screen fresh."""
        until = time.monotonic() + seconds
        while True:
            if self._stops_requested:
                raise StopRequestedError
            for text in self.backend.poll():
                self.dashboard.say(text)
            for name, part in self.backend.parts.items():
                if part.failed and name not in (*self._edges, *self._measurers):
                    raise FleetError(part.failed)
            remaining = until - time.monotonic()
            if remaining <= 0:
                break
            time.sleep(min(0.1, remaining))
        self._refresh()

    def _refresh(self) -> bool:
        """See what the gateway says, and whether it does."""
        try:
            snapshot = self.snapshot()
        except (OSError, json.JSONDecodeError) as error:
            log.debug("no snapshot: %s", error)
            return False
        self.counters.update(snapshot)
        if snapshot["version"] is not None:
            self._newest_version = snapshot["version"]["number"]
        for event in snapshot["events"]:
            if event["kind"] == "refused" and (line := self._refusals.line(event["robot"], event["text"])):
                self.dashboard.say(line)
        self.dashboard.show(snapshot, self.backend.parts, self._edges)
        return True

    def snapshot(self) -> dict[str, Any]:
        """What the page shows, from the gateway. Raises `OSError` when it does not answer."""
        with urllib.request.urlopen(f"{self.page}/api/fleet", timeout=5.0) as answer:
            return json.load(answer)

    def _handle_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._request_stop)

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        self._stops_requested += 1
