from __future__ import annotations

import pytest

from hal.drivers.metaworld.robot import MetaWorldConfig, metaworld_spec
from hal.drivers.metaworld.tasks import KNOWN_TASKS, PIXEL_TASKS, STATE_TASKS, instruction
from wire.errors import ConfigError


def test_the_sentences() -> None:
    assert instruction("drawer-open") == "open the drawer"
    assert instruction("pick-place") == "pick up the puck and bring it to the goal"
    assert instruction("faucet-close") == "close the faucet"
    assert instruction("handle-press-side") == "press the handle side"
    assert instruction("sweep-into") == "sweep into"
    assert len({instruction(task) for task in KNOWN_TASKS}) == 50
    with pytest.raises(ConfigError, match="Did you mean 'drawer-open'"):
        instruction("drawer-opened")


def test_the_names_are_the_simulators() -> None:
    names = pytest.importorskip("metaworld.env_dict").ALL_V3_ENVIRONMENTS
    assert sorted(f"{task}-v3" for task in KNOWN_TASKS) == sorted(names)
    assert list(KNOWN_TASKS) == sorted(KNOWN_TASKS)
    assert {*PIXEL_TASKS, *STATE_TASKS} <= set(KNOWN_TASKS)


def test_specs() -> None:
    pixels, state = (
        metaworld_spec(MetaWorldConfig()),
        metaworld_spec(MetaWorldConfig(tasks=STATE_TASKS, observation="state")),
    )
    assert (pixels.state_dim, pixels.action_dim, len(pixels.cameras)) == (4, 4, 1)
    assert (state.state_dim, state.action_dim, len(state.cameras)) == (39, 4, 0)
    assert pixels.hash != state.hash
    threaded = metaworld_spec(MetaWorldConfig(render_in_thread=True))
    assert threaded.hash == pixels.hash, "how it is drawn is not part of the data stream"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"tasks": ("drawer-opn",)}, "Did you mean 'drawer-open'"),
        ({"tasks": ()}, "no tasks"),
        ({"observation": "smell"}, "pixels"),
        ({"camera_hz": 30.0}, "must divide"),
        ({"camera_hz": 0.0}, "must divide"),
        ({"camera_hz": 160.0}, "must divide"),
        ({"image_px": 256}, "preview_px"),
    ],
)
def test_what_cannot_work_is_refused(wrong: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MetaWorldConfig(**wrong)
