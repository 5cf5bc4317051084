"""The actor: it holds a place on a node and keeps one process there running.

Ray starts the actor again when it or its node dies; the actor starts the process again when that dies; the process ends
by itself when its actor is gone (`robot_edge.runtime.lifecycle.ShutdownSignal`).
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from fleet.config.data_directory import DataDirectory
from fleet.launch.backend import LocalBackend, ProcessSpec, ProcessState
from fleet.ray_backend.node import NodeSettings
from wire.errors import FleetError
from wire.types import Role

TOKEN = "run.token"
"""file in the gateway's data directory, new for each run: who reads the same one sees the same directory"""
_POLL_S = 0.1
_FAULT_PAUSE_S = 5.0


class RayHost:
    """Runs on the part's node. What crosses to and from it are plain strings and numbers."""

    def __init__(self, part: dict[str, Any], data: str, environment: dict[str, str]) -> None:
        """Start the part. `data`: the gateway's data directory, unless this node says another."""
        import ray

        settings = NodeSettings.of()
        made = msgspec.convert(part, ProcessSpec)
        if made.role == Role.edge:
            made = replace(made, argv=(*made.argv, *settings.edge_arguments(made.name)))
            # Ray hides all GPUs from an actor that asks for none; a robot's own is not the cluster's to give.
            if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
                del os.environ["CUDA_VISIBLE_DEVICES"]
        self._part = made
        self._data = DataDirectory(settings.data_root(data))
        self._keys = settings.key_directory(data)
        self._lock = threading.Lock()
        self._stopped = False
        self._fault = ""
        # The node's address as others reach it, for a part that they call.
        address = ray.util.get_node_ip_address()
        self._backend = LocalBackend(self._data.root, self._data.logs, environment=environment, host=address)
        threading.Thread(target=self._keep, name="keep", daemon=True).start()

    def state(self) -> dict[str, Any]:
        """The part's `ProcessState`, plain, and the process id of this actor."""
        with self._lock:
            return {**msgspec.to_builtins(self._now()), "host_pid": os.getpid()}

    def stop(self, grace_s: float) -> dict[str, Any]:
        """End the part; its last state."""
        with self._lock:
            self._stopped = True
            self._backend.stop([self._part.name], grace_s)
            now = self._now()
        if self._part.role == Role.edge:
            now = msgspec.structs.replace(now, steps_recorded=self._data.steps_recorded(self._part.name))
        return {**msgspec.to_builtins(now), "host_pid": os.getpid()}

    def _now(self) -> ProcessState:
        state = self._backend.parts.get(self._part.name, ProcessState())
        return msgspec.structs.replace(state, fault=self._fault or state.fault)

    def _keep(self) -> None:
        """Keep the part running; a disk that is full now may have room later."""
        while True:
            pause_s = _POLL_S
            with self._lock:
                if self._stopped:
                    return
                try:
                    if self._part.name not in self._backend.parts or self._fault:
                        self._backend.start(self._part, self._keys)
                    self._backend.poll()
                    self._fault = ""
                except FleetError as error:
                    self._fault, pause_s = f"{self._part.name}: {error}", _FAULT_PAUSE_S
            time.sleep(pause_s)


def probe_node(data: str, token: str) -> tuple[bool, list[str]]:
    """Of the node this runs on: whether it sees the gateway's data directory, and whose secret keys it has."""
    settings = NodeSettings.of()
    keys = settings.key_directory(data)
    names = [path.name.removesuffix(".key_secret") for path in keys.glob("*.key_secret")] if keys.is_dir() else []
    try:
        told = (Path(data) / TOKEN).read_text().strip()
    except OSError:
        told = ""
    return told == token and settings.data_root(data) == Path(data), sorted(names)
