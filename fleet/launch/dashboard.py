"""What a person sees in the terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fleet.config.recipe import Recipe
from fleet.launch.backend import ProcessState

_STYLES = {"policy": "green", "script": "yellow", "human": "blue", "hold": "dim", "reset": "dim", "estop": "bold red"}
_BARS = " ▁▂▃▄▅▆▇█"
_LINE_EVERY_S = 10.0


class Dashboard:
    """A live table on a terminal; one line every ten seconds elsewhere."""

    def __init__(self, page: str, recipe: Recipe, root: Path, *, headless: bool) -> None:
        self._page = page
        self._recipe = recipe
        self._root = root
        self._console = Console(stderr=True)
        self._live = None if headless or not self._console.is_terminal else Live(console=self._console)
        self._next_line = 0.0
        if self._live is not None:
            self._live.start()

    def say(self, text: str) -> None:
        """One line that stays."""
        # a log has lines as long as they are; only a terminal is as wide as it is
        console = self._live.console if self._live else self._console
        console.print(text, highlight=False, soft_wrap=self._live is None)

    def show(self, snapshot: dict[str, Any], parts: Mapping[str, ProcessState], robots: Sequence[str]) -> None:
        """The newest state. `robots`: names of those among `parts`; the gateway knows only those that came to it."""
        if self._live is not None:
            self._live.update(self._picture(snapshot, parts, robots))
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_EVERY_S
            self.say(_line(snapshot))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _picture(self, snapshot: dict[str, Any], parts: Mapping[str, ProcessState], robots: Sequence[str]) -> Group:
        table = Table(title=f"vla-fleet · {self._recipe.name} · {self._page}", title_justify="left")
        for name in ("robot", "in control", "task", "version", "episodes", "interventions", "missed ticks"):
            table.add_column(name, justify="left" if name in ("robot", "in control", "task") else "right")
        for robot in snapshot["robots"]:
            mode = "lost" if robot["link"] == "lost" else robot["mode"]
            reason = ": ".join(filter(None, (robot.get("reason"), robot.get("detail"))))
            table.add_row(
                robot["name"],
                Text(f"{mode} ({reason})" if reason else mode, style=_STYLES.get(mode, "bold red")),
                robot.get("task") or "–",
                str(robot.get("version", 0)),
                str(robot.get("episodes", 0)),
                str(robot.get("interventions", 0)),
                f"{100 * robot['missed_ticks'] / max(1, robot['ticks']):.2f}%" if robot.get("ticks") else "–",
            )
        shown = {robot["name"] for robot in snapshot["robots"]}
        for name in robots:
            if name not in shown and parts[name].fault:
                table.add_row(name, Text(parts[name].fault, style="bold red"), "–", "–", "–", "–", "–")
        restarts = sum(max(0, part.starts - 1) for part in parts.values())
        last = f"   processes started again: {restarts}" if restarts else ""
        return Group(table, Text(_line(snapshot) + last), Text(f"success {_curve(snapshot)}"))


def _line(snapshot: dict[str, Any]) -> str:
    totals, trainer, version = snapshot["totals"], snapshot["trainer"], snapshot["version"]
    robots = snapshot["robots"]
    curve = snapshot["curve"]
    parts = [f"{snapshot['t_s'] / 60:5.1f} min"]
    if curve:
        parts.append(f"success {curve[-1]['mean']:.2f} (v{curve[-1]['version']})")
    if unaided := snapshot["unaided"]:
        parts.append(f"on their own {unaided['success']:.2f} of {unaided['episodes']} episodes")
    parts.append(f"version {version['number'] if version else 0}")
    if trainer:
        parts.append(f"{trainer['phase']}: step {trainer['gradient_steps']}, loss {trainer['loss'] or 0:.3f}")
        parts.append(f"{trainer['imitated_steps']} human steps")
    parts.append(f"{sum(robot.get('episodes') or 0 for robot in robots)} episodes")
    parts.append(f"{sum(robot.get('interventions') or 0 for robot in robots)} interventions")
    parts.append(f"{totals['steps_stored']} steps stored")
    for label, key in (("ingest", "ingest_p50_s"), ("publish→acting", "applied_p50_s")):
        if totals.get(key) is not None:
            parts.append(f"{label} {1e3 * totals[key]:.0f} ms")
    return " · ".join(parts)


def _curve(snapshot: dict[str, Any]) -> str:
    points = snapshot["curve"][-60:]
    bars = "".join(_BARS[round(point["mean"] * (len(_BARS) - 1))] for point in points)
    return f"{bars} {points[-1]['mean']:.0%}" if points else "not measured yet"
