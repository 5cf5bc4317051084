"""`vla-fleet robots | jobs | submit | cancel | lease | release`: the fleet as resources.

They speak to a running gateway with the key `console`, from its own machine or another one.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from fleet.cli.options import AsJson, command, echo_json, take_interrupts
from fleet.config.overrides import unset
from fleet.config.process_options import ClientOptions
from wire.errors import ConfigError, RejectedError, WireError

if TYPE_CHECKING:
    from rich.table import Table

    from fleet.cli.client import FleetClient
    from wire.messages.fleet import JobRequest, JobState, RobotState
    from wire.types import Lease

Robot = Annotated[str, typer.Argument(help="Name of the robot.")]


@dataclass(frozen=True, kw_only=True)
class ConsoleOptions(ClientOptions):
    """Of every command here: which fleet is asked, and by which key."""

    recipe: Annotated[str, typer.Option(help="Which fleet, when --data is not given: data/RECIPE.")] = "pixels"
    gateway: Annotated[str, unset("The gateway, tcp://HOST:PORT; default: the one that runs on DATA here.")] = ""
    name: Annotated[str, typer.Option(help="Name of the key, a console's.")] = "console"

    def client(self) -> FleetClient:
        """A connection to the gateway. Raises `ConfigError` or `WireError`."""
        from fleet.cli.client import FleetClient
        from fleet.config.data_directory import DataDirectory

        return FleetClient(self.gateway or DataDirectory(self.root).gateway, self.key_directory, self.name)


@dataclass(frozen=True, kw_only=True)
class ListOptions(ConsoleOptions):
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class SubmitOptions(ConsoleOptions):
    kind: Annotated[str, typer.Option(help="evaluation (measure a version on held-out seeds) or rollout.")]
    version: Annotated[int, typer.Option(min=0, help="evaluation: of this policy version; 0: the newest.")] = 0
    episodes: Annotated[
        int, typer.Option(min=0, help="Done after so many; an evaluation: of each task; 0: never (rollout only).")
    ] = 0
    robots: Annotated[int, typer.Option(min=0, help="On so many robots at once; 0: on all there are.")] = 1
    task: Annotated[list[str] | None, typer.Option(help="A task; may be given several times; default: all.")] = None
    site: Annotated[str, unset("Only on robots that stand there.")] = ""
    robot: Annotated[list[str] | None, typer.Option(help="Only on this robot; may be given several times.")] = None
    priority: Annotated[int, typer.Option(min=0, help="0: the usual one of its kind.")] = 0
    id: Annotated[str, unset("Name of the job; default: one is made.")] = ""
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class CancelOptions(ConsoleOptions):
    job: Annotated[str, typer.Argument(help="Name of the job.")]


@dataclass(frozen=True, kw_only=True)
class LeaseOptions(ConsoleOptions):
    robot: Robot
    ttl: Annotated[float, typer.Option(min=1.0, help="Seconds without a heartbeat after which it ends.")] = 60.0
    purpose: Annotated[str, typer.Option(help="What for, in a word.")] = "maintenance"
    priority: Annotated[int, typer.Option(min=0, help="0: the usual one of the purpose.")] = 0


@dataclass(frozen=True, kw_only=True)
class ReleaseOptions(ConsoleOptions):
    robot: Robot
    force: Annotated[bool, typer.Option("--force", help="Whoever holds it; a job gets it back as it can.")] = False


_HEALTH_STYLES = {"ready": "green", "starting": "cyan", "degraded": "yellow", "draining": "yellow"}
_PHASE_STYLES = {"running": "green", "waiting": "yellow", "cancelled": "dim", "done": "bold"}


def add_commands(app: typer.Typer) -> None:
    """Add them to `app`."""

    @command(app, ListOptions, log=False)
    def robots(options: ListOptions) -> None:
        """The fleet's robots: what they are, how they are, who holds them."""
        with options.client() as fleet:
            found = fleet.fleet()
        if options.as_json:
            echo_json({"robots": found.robots, "specs": found.specs})
        else:
            show_table(_robot_table(found.robots))

    @command(app, ListOptions, log=False)
    def jobs(options: ListOptions) -> None:
        """Jobs that wait, run, or ended lately, and how far they are."""
        with options.client() as fleet:
            found = fleet.jobs()
        if options.as_json:
            echo_json(found)
        else:
            show_table(_job_table(found))

    @command(app, SubmitOptions, log=False)
    def submit(options: SubmitOptions) -> None:
        """Hand a job in. The scheduler gives it robots as soon as matching ones are free or do something lesser."""
        if options.kind == "evaluation" and not options.episodes:
            raise ConfigError("an evaluation needs --episodes: so many of each task.")
        with options.client() as fleet:
            state = fleet.submit(_request(options))
        if options.as_json:
            echo_json(state)
        else:
            note = f": {state.note}" if state.note else ""
            typer.echo(f"job {state.request.id} is {state.phase}{note}")

    @command(app, CancelOptions, log=False)
    def cancel(options: CancelOptions) -> None:
        """End a job; its robots finish their episode and get other work."""
        with options.client() as fleet:
            state = fleet.cancel(options.job)
        typer.echo(f"job {options.job} is {state.phase} after {state.episodes} episodes")

    @command(app, LeaseOptions, log=False)
    def lease(options: LeaseOptions) -> None:
        """Hold a robot until Ctrl-C: it finishes its episode and rests. Exit status 1 when somebody else takes it."""
        robot, purpose = options.robot, options.purpose
        take_interrupts()
        with options.client() as fleet:
            held = fleet.lease(robot, options.ttl, purpose, options.priority)
            typer.echo(
                f"{robot} is yours (lease {held.number}, {purpose}, priority {held.priority}); Ctrl-C gives it back"
            )
            try:
                _hold(fleet, held, options.ttl)
            except KeyboardInterrupt:
                fleet.release(held)
                typer.echo(f"{robot} is given back")

    @command(app, ReleaseOptions, log=False)
    def release(options: ReleaseOptions) -> None:
        """Give a robot back that this key holds."""
        with options.client() as fleet:
            fleet.release(options.robot, options.force)
        typer.echo(f"{options.robot} is released")


# --- inside ---------------------------------------------------------------------------------------------------------


def _request(options: SubmitOptions) -> JobRequest:
    from wire.messages.fleet import JobRequest, Requirement

    return JobRequest(
        id=options.id or f"{options.kind}-{secrets.token_hex(3)}",
        kind=options.kind,
        tasks=tuple(options.task or ()),
        robots=options.robots,
        episodes=options.episodes,
        requirement=Requirement(site=options.site, robots=tuple(options.robot or ())),
        priority=options.priority,
        version=options.version,
        submitter=options.name,
    )


def _hold(fleet: FleetClient, held: Lease, ttl_s: float) -> None:
    """Renew until interrupted. Raises `RejectedError` when the lease has ended, saying for whom."""
    next_s = time.monotonic() + ttl_s / 3
    silent = ""
    while True:
        fleet.listen(min(0.2, ttl_s / 10))
        for ended in fleet.preempted():
            raise RejectedError(f"{ended.lease.robot} is not yours any more: {ended.reason}")
        if time.monotonic() < next_s:
            continue
        next_s = time.monotonic() + ttl_s / 3
        try:
            held = fleet.renew(held)
        except RejectedError as error:
            raise RejectedError(f"{held.robot} is not yours any more: {error}") from error
        except WireError as error:
            # a gateway that is started again knows the lease; until it ends there is hope
            if str(error) != silent:
                sys.stderr.write(f"vla-fleet: {error} Trying again.\n")
            silent = str(error)
            next_s = time.monotonic() + 1.0


def show_table(table: Table) -> None:
    """Print it."""
    from rich.console import Console

    Console().print(table)


def table_of(title: str, *columns: str, right: Iterable[str] = ()) -> Table:
    """An empty one; the columns `right` are aligned there."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


def _robot_table(found: tuple[RobotState, ...]) -> Table:
    from rich.text import Text

    ready = sum(robot.health == "ready" for robot in found)
    table = table_of(
        f"{len(found)} robots, {ready} ready",
        *("robot", "embodiment", "site", "health", "load", "job", "held by"),
        right=("load",),
    )
    for robot in found:
        reason = f" ({robot.reason})" if robot.reason else ""
        lease = robot.lease
        holder = "–" if lease is None else f"{lease.holder} ({lease.purpose}, priority {lease.priority})"
        table.add_row(
            Text(robot.name, style="bold"),
            Text(robot.capabilities.embodiment),
            Text(robot.capabilities.site or "–"),
            Text(f"{robot.health}{reason}", style=_HEALTH_STYLES.get(robot.health, "bold red")),
            f"{robot.load:.0%}",
            Text(robot.job or "–"),
            Text(holder),
        )
    return table


def _job_table(found: tuple[JobState, ...]) -> Table:
    from rich.text import Text

    running = sum(job.phase == "running" for job in found)
    table = table_of(
        f"{len(found)} jobs, {running} running",
        *("job", "kind", "phase", "robots", "episodes", "success", "tasks"),
        right=("episodes", "success"),
    )
    for job in found:
        request = job.request
        kind = request.kind + (f" v{request.version}" if request.version else "")
        wanted = request.episodes * (len(request.tasks) if request.kind == "evaluation" else 1)
        note = f" ({job.note})" if job.note else ""
        table.add_row(
            Text(request.id, style="bold"),
            kind,
            Text(f"{job.phase}{note}", style=_PHASE_STYLES.get(job.phase, "")),
            Text(", ".join(job.robots) or "–"),
            f"{job.episodes}/{wanted}" if wanted else str(job.episodes),
            f"{job.successes / judged:.0%}" if (judged := job.episodes - job.unjudged) else "–",
            Text(", ".join(request.tasks)),
        )
    return table
