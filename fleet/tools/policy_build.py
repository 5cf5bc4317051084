"""Builds a recipe's tiny policy in a process of its own: `up` itself stays without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from types import TracebackType

from fleet.config.data_directory import DataDirectory
from wire.errors import FleetError, storage_error


class Building:
    """`vla-fleet policy tiny`, from its start until the directory is there whole; a context manager."""

    def __init__(self, kind: str, data: DataDirectory, recipe: str, seed: int) -> None:
        """`kind` is built in `data.policy`, which is not there yet, with the statistics of what `data` has recorded."""
        self._place, self._log = data.policy, data.logs / "policy.log"
        place, log = self._place, self._log
        # Only a whole one gets the name by which it is found again.
        self._half = place.with_name(f"{place.name}.building")
        shutil.rmtree(self._half, ignore_errors=True)
        words = [
            "policy",
            "tiny",
            kind,
            str(self._half),
            "--recipe",
            recipe,
            "--seed",
            str(seed),
            "--data",
            str(data.root),
        ]
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            output = log.open("wb")
        except OSError as error:
            raise storage_error(error, "building the policy", log) from error
        with output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fleet.cli", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def done(self) -> bool:
        """Whether it is there. Raises `FleetError` with the builder's last word."""
        status = self._process.poll()
        if status is None:
            return False
        if status != 0:
            lines = self._log.read_text(errors="replace").strip().splitlines()
            raise FleetError(f"the policy cannot be built: {lines[-1] if lines else status} (see {self._log})")
        try:
            self._half.rename(self._place)
        except OSError as error:
            raise storage_error(error, "building the policy", self._place) from error
        return True

    def __enter__(self) -> Building:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
