"""What `vla-fleet up` is asked for, and whether that can be."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path

from fleet.config.overrides import Tuning
from wire.errors import ConfigError

EVERYWHERE = ("0.0.0.0", "::", "*")


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asked for."""

    recipe: str
    robots: int | None
    """simulated robots of this machine; None: the usual number, or what the cluster's nodes have"""
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
    backend: str = "local"
    """local or ray"""
    ray_address: str = ""
    """auto or HOST:PORT; '': a cluster of this machine alone"""
    host: str = ""
    """where the gateway listens; '': this machine only, or with Ray this node's address"""
    think_server: bool = False
    """robots think in one think server"""
    measure_at: tuple[float, ...] = ()
    """minutes: what was the newest version then is measured at the end, too"""


def check_options(options: Options) -> None:
    """Raises `ConfigError` for options that contradict each other."""
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


def free_port(port: int, host: str, option: str) -> int:
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
