"""lerobot's asynchronous edge, `robot_client` and `policy_server`, as a user runs it, for `benchmarks.edge_latency`.

    python -m benchmarks.edge_latency.lerobot server --host=127.0.0.1 --port=N --fps=50 ...
    python -m benchmarks.edge_latency.lerobot client --robot.type=stand_in --robot.record=FILE ...

Everything after the first word goes to lerobot's own command line. The stand-in arm is registered as a third party's
robot is; lerobot finds its class because this module is the one that runs. The server's SmolVLA is the marked one.
Nothing of lerobot's client or server is changed, and all times are taken inside the robot.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lerobot.robots.config import RobotConfig
from lerobot.robots.robot import Robot

from benchmarks.edge_latency.arm import ACTION, CAMERAS, PX, STATE, Arm
from benchmarks.edge_latency.children import die_with_parent
from benchmarks.edge_latency.vla import marked, offline


@RobotConfig.register_subclass("stand_in")
@dataclass
class StandInConfig(RobotConfig):
    """`--robot.type=stand_in`"""

    seed: int = 0
    record: str = ""
    """file for what happened"""


class StandIn(Robot):
    """The arm of `arm` as lerobot knows robots."""

    config_class = StandInConfig
    name = "stand_in"

    def __init__(self, config: StandInConfig) -> None:
        super().__init__(config)
        self._config = config
        self._arm: Arm | None = None

    @property
    def observation_features(self) -> dict[str, Any]:
        return {**dict.fromkeys(STATE, float), **dict.fromkeys(CAMERAS, (PX, PX, 3))}

    @property
    def action_features(self) -> dict[str, Any]:
        return dict.fromkeys(ACTION, float)

    @property
    def is_connected(self) -> bool:
        return self._arm is not None

    def connect(self, calibrate: bool = True) -> None:
        self._arm = Arm(Path(self._config.record), self._config.seed)

    @property
    def is_calibrated(self) -> bool:
        return True

    def calibrate(self) -> None: ...

    def configure(self) -> None: ...

    def get_observation(self) -> dict[str, Any]:
        assert self._arm is not None
        _, state, _, frames = self._arm.read()
        return {**dict(zip(STATE, state.tolist(), strict=True)), **frames}

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        assert self._arm is not None
        self._arm.write(np.array([action[name] for name in ACTION], np.float32))
        return action

    def disconnect(self) -> None:
        if self._arm is not None:
            self._arm.save()
            self._arm = None


def main() -> None:
    """Become the client or the server; SIGINT ends either, as Ctrl-C does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    die_with_parent()
    offline()
    part = sys.argv.pop(1)
    if part == "server":
        import lerobot.policies.smolvla.modeling_smolvla as smolvla
        from lerobot.async_inference.policy_server import serve

        # lerobot's factory looks the class up here when a client asks for a SmolVLA
        smolvla.SmolVLAPolicy = marked()
        serve()
    else:
        from lerobot.async_inference.robot_client import async_client

        async_client()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        os._exit(0)
