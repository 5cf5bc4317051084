"""The success curve of a report as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wire.errors import ConfigError, storage_errors


def draw(report_path: Path, picture: Path) -> None:
    """Write the curve in `report_path` to `picture`.

    Raises `ConfigError` when the file is no report, when matplotlib is not installed or when it does not know the
    picture's ending.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("drawing needs matplotlib: install vla-fleet[dev].") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    report = _read(report_path)
    curve = report["success_curve"]
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    minutes = [point["time_s"] / 60 for point in curve]
    for task in sorted(curve[0]["success"]) if curve else []:
        axes.plot(minutes, [point["success"][task] for point in curve], linewidth=1, alpha=0.7, label=task)
    axes.plot(minutes, [point["mean"] for point in curve], color="black", linewidth=2.5, label="mean")
    for label in ("before", "after"):
        value = report[f"success_{label}"]
        if value is not None:
            text = f"{label}: {value:.2f} ({report['evaluation_episodes_per_task']} episodes per task)"
            axes.axhline(value, linestyle=":", color="grey", linewidth=1)
            axes.annotate(text, (0, value), xytext=(4, 4), textcoords="offset points", fontsize=8)
    axes.set(xlabel="minutes of robots at work", ylabel="held-out success", ylim=(-0.02, 1.05))
    axes.set_title(f"recipe {report['recipe']} on {report['machine']}", fontsize=10)
    axes.legend(fontsize=8, loc="lower right")
    try:
        with storage_errors("drawing the curve", picture):
            figure.savefig(picture, dpi=130)
    except ValueError as error:
        raise ConfigError(f"{picture}: {error}. Use .png, .svg or .pdf.") from error
    finally:
        pyplot.close(figure)


def _read(path: Path) -> dict[str, Any]:
    try:
        with storage_errors("reading the report", path):
            report = json.loads(path.read_text())
        return {name: report[name] for name in (*_FIELDS, "success_curve")}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no report of `vla-fleet up --report`: {error!r}.") from error


_FIELDS = ("recipe", "machine", "success_before", "success_after", "evaluation_episodes_per_task")
