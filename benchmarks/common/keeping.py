"""What a long benchmark has measured stays in a folder, so that a run that was stopped goes on."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.table import Result, end_in_order, run


def run_keeping(name: str, measure: Callable[[bool, Path], Result], arguments: list[str] | None = None) -> int:
    """`run` of a benchmark that also takes `--keep DIR`, a folder that `measure` goes on from; a temporary one without
    it."""
    end_in_order()
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--keep", type=Path)
    own, others = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory(prefix="vla-fleet-bench-") as directory:
        home = own.keep or Path(directory)
        home.mkdir(parents=True, exist_ok=True)
        return run(name, lambda quick: measure(quick, home), others)


def keep_settings(path: Path, settings: dict[str, Any]) -> None:
    """Refuse to go on in a folder where something was made in another way."""
    text = json.dumps(settings)
    if path.exists() and path.read_text() != text:
        raise SystemExit(f"{path} is of a run with other settings ({path.read_text()}); choose another --keep.")
    path.write_text(text)


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """What JSON `path` holds; if it is not there, what `make` gives, which is then put there, whole or not at all."""
    if not path.exists():
        part = path.with_suffix(".part")
        part.write_text(json.dumps(make()))
        part.replace(path)
    return json.loads(path.read_text())
