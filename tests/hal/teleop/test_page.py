"""What docs/robots.md says of LeRobot's robots and of teleoperation is so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hal.registry import ROBOTS, TELEOPERATORS, known, read_config

PAGE = (Path(__file__).parents[3] / "docs" / "robots.md").read_text().partition("## LeRobot robots")[2]
EXAMPLES = re.findall(r"For (the teleoperator )?`(\w+)`:\n+```json\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_has_its_examples() -> None:
    assert [(bool(device), kind) for device, kind, _ in EXAMPLES] == [
        (False, "lerobot"),
        (True, "lerobot"),
        (True, "lerobot"),
    ]


@pytest.mark.parametrize(("device", "kind", "text"), EXAMPLES, ids=["robot", "leader", "phone"])
def test_an_example_is_a_configuration(device: str, kind: str, text: str) -> None:
    config = read_config(kind, json.loads(text), TELEOPERATORS if device else ROBOTS)
    assert config.type in ("so101_follower", "so101_leader", "phone")


def test_every_device_is_on_the_page() -> None:
    built_in = {"gamepad", "keyboard", "lerobot", "script"}
    assert built_in <= set(known(TELEOPERATORS))
    assert all(f"| `{device}` |" in PAGE for device in built_in)


def test_named_files_are_there() -> None:
    named = set(re.findall(r"`((?:hal|tests)/[a-z_/]+\.py)`", PAGE))
    assert len(named) >= 5
    assert all((Path(__file__).parents[3] / name).exists() for name in named)
