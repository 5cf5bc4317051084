"""What `vla-fleet up` is asked for, and whether that can be."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from cloud_learner.buffer.maintenance.retention import Retention
from fleet.config.overrides import Overrides, read_retention, unset
from fleet.config.process_options import (
    NOTHING,
    PORT,
    SIMULATED,
    WEB_PORT,
    LedgerUrl,
    Operator,
    Port,
    ProcessOptions,
    RetentionText,
    Seed,
    StoreUrl,
    WebHost,
    WebPort,
)
from wire.errors import ConfigError

EVERYWHERE = ("0.0.0.0", "::", "*")


@dataclass(frozen=True, kw_only=True)
class UpOptions(ProcessOptions):
    """What the command line asked for."""

    robots: Annotated[int | None, typer.Option(min=1, max=64, help="How many simulated robots; default 3.")] = None
    """None: the usual number, or what the cluster's nodes have"""
    minutes: Annotated[
        float | None, typer.Option(min=0.0, help="Stop after so many minutes of robots at work; default: at Ctrl-C.")
    ] = None
    seed: Seed = 0
    headless: Annotated[bool, typer.Option("--headless", help="Lines instead of a live table.")] = False
    report: Annotated[Path | None, typer.Option(help="Write what was measured to this JSON file.")] = None
    measure_at: Annotated[
        list[float],
        typer.Option(
            min=0.0,
            metavar="MIN",
            show_default=False,
            help="For the report, also measure what is the newest version after MIN minutes, once the run is over; may "
            "be repeated.",
        ),
    ] = field(default_factory=list)
    port: Port = PORT
    web_port: WebPort = WEB_PORT
    web_host: WebHost = "127.0.0.1"
    operator: Operator = True
    ledger: LedgerUrl = ""
    store: StoreUrl = ""
    retention: RetentionText = ""
    backend: Annotated[
        str, typer.Option(help="Where parts run: local (children of this process) or ray (nodes of a Ray cluster).")
    ] = "local"
    ray_address: Annotated[str, unset("The Ray cluster: auto or HOST:PORT; default: one of this machine alone.")] = ""
    host: Annotated[str, unset("Address the gateway listens on; default 127.0.0.1, with Ray this node's.")] = ""
    think_server: Annotated[bool, typer.Option("--think-server", help="Robots think in one think server.")] = False
    overrides: Annotated[Overrides, SIMULATED] = NOTHING


def check_options(options: UpOptions) -> None:
    """Raises `ConfigError` for options that contradict each other, and for a retention that says nothing known."""
    read_retention(options.retention, Retention())
    if options.backend not in ("local", "ray"):
        raise ConfigError(f"--backend {options.backend}: there are local and ray.")
    if options.backend == "local" and options.ray_address:
        raise ConfigError(f"--ray-address {options.ray_address} needs --backend ray.")
    if options.ray_address and options.robots is not None:
        raise ConfigError(
            f"--robots {options.robots} with --ray-address {options.ray_address}: the cluster's nodes say which robots "
            "there are. Leave --robots out, and start nodes with `vla-fleet ray-node --robots NAME,NAME`."
        )
    if options.measure_at and options.report is None:
        raise ConfigError("--measure-at needs --report FILE: versions are measured for the report.")
    late = [minute for minute in options.measure_at if options.minutes is None or minute > options.minutes]
    if late:
        raise ConfigError(f"--measure-at {late[0]:g}: the run must take that long; set --minutes to at least that.")


def free_port(port: int, host: str, option: str = "--port") -> int:
    """`port` if it is free, any free one for 0. Raises `ConfigError` that names the option to change."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("" if host in EVERYWHERE else host, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} on {host} cannot be used: {error.strerror}. Stop the program that uses it or choose "
                f"another with {option} (0 takes a free one)."
            ) from error
        return probe.getsockname()[1]
