"""What docs/robots.md shows works: its configurations, and a package that brings a robot."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hal.interfaces.robot import Robot
from hal.registry import CAMERAS, ROBOTS, known, make_camera, make_robot, read_config
from hal.safety.rest import rest_action
from tests.hal.cameras.filming import write_video
from tests.hal.drivers.recorded import record

ROOT = Path(__file__).resolve().parents[3]
# what follows is tested where it is at home
PAGE = (ROOT / "docs" / "robots.md").read_text().split("## LeRobot robots")[0]
EXAMPLES = [(kind, json.loads(text)) for kind, text in re.findall(r"`([a-z0-9-]+)`:\n\n```json\n(.*?)```", PAGE, re.S)]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


def example(kind: str, number: int = 0) -> dict[str, Any]:
    return [config for name, config in EXAMPLES if name == kind][number]


def one_tick(robot: Robot, task: str, cameras: list[str]) -> None:
    robot.connect()
    try:
        robot.reset(task, 3)
        seen = robot.read()
        assert sorted(seen.images) == sorted(cameras)
        for camera in robot.spec.cameras:
            assert seen.images[camera.name].image.shape == (camera.height, camera.width, 3)
        assert np.isfinite(robot.write(rest_action(robot.spec, seen.state)).executed).all()
    finally:
        robot.close()


def test_every_example_is_tested() -> None:
    assert len(EXAMPLES) == len(blocks("json")) == 5
    assert [kind for kind, _ in EXAMPLES] == ["gymnasium", "gymnasium", "replay", "with-cameras", "opencv"]


def test_the_tables_name_what_there_is() -> None:
    robots, cameras = PAGE.split("## Cameras")
    for text, group in ((robots, ROBOTS), (cameras, CAMERAS)):
        rows = re.findall(r"^\| (`[a-z0-9-]+`(?:, `[a-z0-9-]+`)*) \|", text, re.M)
        named = {name for row in rows for name in re.findall(r"`([a-z0-9-]+)`", row)}
        assert named
        assert named <= set(known(group)), named - set(known(group))


@pytest.mark.parametrize(
    ("number", "module", "task", "cameras"),
    [(0, "gymnasium_robotics", "reach", []), (1, "gym_pusht", "push-t", ["top", "view"])],
)
def test_gymnasium_examples(number: int, module: str, task: str, cameras: list[str]) -> None:
    pytest.importorskip(module)
    one_tick(make_robot("gymnasium", read_config("gymnasium", example("gymnasium", number))), task, cameras)


def test_the_example_recipe_and_its_guide(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnasium_robotics")
    from fleet.config.recipes import get_recipe
    from hal.registry import make_operator

    monkeypatch.syspath_prepend(ROOT / "docs" / "examples")
    recipe = get_recipe("own_env:reach")
    robot = make_robot(recipe.robot, recipe.robot_config)
    assert robot.spec == recipe.spec and recipe.tasks == ("reach",)
    guide = make_operator(recipe.robot, robot)
    robot.connect()
    for seed in range(3):
        robot.reset("reach", seed)
        for tick in range(recipe.loop.max_ticks):
            action = guide.propose(robot.read())
            assert action is not None
            if robot.write(action).success:
                break
        assert 0 < tick < recipe.loop.max_ticks - 1
        assert guide.progress() < 0.1
    robot.close()


def test_the_replay_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hal.drivers.fake import FakeConfig, FakeRobot
    from wire.episode_file import EpisodeHeader, write_episode

    monkeypatch.chdir(tmp_path)
    segments = record(30).segments
    spec = FakeRobot(FakeConfig(image_px=32)).spec
    header = EpisodeHeader(spec, segments[0].episode, "go to the right", "success", 30)
    config = example("replay")
    write_episode(Path(config["path"]), header, segments)
    one_tick(make_robot("replay", read_config("replay", config)), "go-right", ["front"])


def test_the_camera_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = example("with-cameras")
    write_video(Path(config["cameras"][1]["config"]["path"]), 10)
    one_tick(make_robot("with-cameras", read_config("with-cameras", config)), "go-up", ["front", "wrist", "door"])
    camera = make_camera("opencv", read_config("opencv", example("opencv"), CAMERAS))
    assert (camera.spec.name, camera.spec.height, camera.spec.rate_hz) == ("wrist", 240, 30)


def test_a_package_brings_a_robot_by_entry_points(tmp_path: Path) -> None:
    """Installed as any package is: a module and its metadata on the path, made from the page's own text."""
    import tomllib

    (toml,) = blocks("toml")
    points = tomllib.loads(toml)["project"]["entry-points"]
    about = tmp_path / "slider-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: slider\nVersion: 1.0\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in table.items()) for group, table in points.items()]
    (about / "entry_points.txt").write_text("\n".join(lines))
    source = (ROOT / "docs" / "examples" / "own_robot.py").read_text()
    by_hand = 'register("slider", Slider, Coach)\n'
    assert by_hand in source
    (tmp_path / "own_robot.py").write_text(source.replace(by_hand, ""))
    (python,) = blocks("python")
    code = (
        "import sys\nfrom hal.registry import ROBOTS, known, make_operator, make_robot\n"
        "assert 'slider' in known(ROBOTS) and 'own_robot' not in sys.modules\n"
        "robot = make_robot('slider')\nrobot.connect()\nrobot.reset('reach', 3)\n"
        "assert make_operator('slider', robot).propose(robot.read()) is not None\n" + python
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
