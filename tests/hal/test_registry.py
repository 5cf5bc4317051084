from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

import hal.registry as registry
from hal.drivers.fake import FakeConfig, FakeExpert, FakeRobot
from hal.registry import OPERATORS, ROBOTS, broken, known, make_operator, make_robot
from wire.clock import ManualClock
from wire.errors import ConfigError, RobotError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """Entry points of other packages; what other tests registered is not there."""
    monkeypatch.setattr(registry, "_registered", {registry.ROBOTS: {}, registry.OPERATORS: {}})
    points: list[EntryPoint] = []
    monkeypatch.setattr(registry, "entry_points", lambda group: [p for p in points if p.group == group])
    return points


def test_it_makes_what_it_lists() -> None:
    assert {"fake", "metaworld"} <= set(known(ROBOTS))
    assert {"fake", "metaworld"} <= set(known(OPERATORS))
    robot = make_robot("fake", FakeConfig(tasks=("go-up",)))
    assert isinstance(robot, FakeRobot) and robot.tasks == ("go-up",)
    assert isinstance(make_operator("fake", robot), FakeExpert)
    assert make_robot("metaworld").spec.action_dim == 4


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no robot 'metawold'\. Did you mean 'metaworld'"):
        make_robot("metawold")
    with pytest.raises(ConfigError, match=r"no operator 'fale'\. Did you mean 'fake'"):
        make_operator("fale", FakeRobot())


def test_a_broken_package_is_named_and_hides_nobody(installed: list[EntryPoint]) -> None:
    installed.append(EntryPoint("arm", "no_such_package.arm:Arm", registry.ROBOTS))
    assert {"arm", "fake", "metaworld"} <= set(known(ROBOTS))
    assert isinstance(make_robot("fake"), FakeRobot)
    with pytest.raises(RobotError, match=r"'arm = no_such_package.arm:Arm'.*ModuleNotFoundError"):
        make_robot("arm")
    assert set(broken()) == {"arm"}


def test_what_is_no_robot_is_refused(installed: list[EntryPoint]) -> None:
    installed.append(EntryPoint("text", "hal.drivers.metaworld.tasks:instruction_or_none", registry.ROBOTS))
    installed.append(EntryPoint("dict", "builtins:bool", registry.ROBOTS))
    with pytest.raises(RobotError, match="text"):
        make_robot("text")
    with pytest.raises(RobotError, match="gave a bool, which lacks"):
        make_robot("dict")


def test_a_package_cannot_take_a_built_in_name(installed: list[EntryPoint]) -> None:
    installed.append(EntryPoint("fake", "no_such_package:Fake", registry.ROBOTS))
    assert isinstance(make_robot("fake"), FakeRobot)


def test_nothing_heavy_is_imported_for_a_spec() -> None:
    code = (
        "import sys; from hal.registry import ROBOTS, known, make_robot; known(ROBOTS)\n"
        "assert not any(m.startswith('hal.drivers.metaworld.robot') for m in sys.modules)\n"
        "print(make_robot('metaworld').spec.hash)\n"
        "import hal.resource.capabilities, hal.scheduler.scheduler\n"
        "heavy = {'mujoco', 'metaworld', 'torch', 'cv2', 'gymnasium'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) == 16


def test_a_clock_goes_to_those_that_take_one_and_others_are_told(installed: list[EntryPoint]) -> None:
    class Stubborn(FakeRobot):
        def __init__(self, config: FakeConfig | None = None) -> None:
            super().__init__(config)

    clock = ManualClock(5)
    registry.register("stubborn", Stubborn)
    assert isinstance(make_robot("stubborn"), Stubborn)
    with pytest.raises(ConfigError, match=r"'stubborn' cannot be used faster than real time.*clock=None"):
        make_robot("stubborn", None, clock)
    robot = make_robot("fake", None, clock)
    robot.connect()
    robot.reset("go-left", 0)
    assert robot.read().time_ns == clock.now_ns()
