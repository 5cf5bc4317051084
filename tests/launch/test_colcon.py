"""`colcon build` makes a package of which `ros2 run` and `ros2 launch` find nodes and launch files."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.description import FILES, ROOT
from tests.ros import needs_ros, ros_environment

COLCON = Path(sys.executable).with_name("colcon")
pytestmark = [
    pytest.mark.slow,
    needs_ros,
    pytest.mark.skipif(not COLCON.exists(), reason="colcon is not installed; pip install 'vla-fleet[dev]'"),
]


def copy_tree(to: Path) -> None:
    """The files that a clone would have."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        source = ROOT / name
        if name and source.is_file() and not name.startswith(("data/", "docs/", "tests/")):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, to / name)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A built workspace; its install space is `install/vla_fleet`."""
    place = tmp_path_factory.mktemp("workspace")
    source = place / "src" / "vla_fleet"
    copy_tree(source)
    shutil.copy2(ROOT / "README.md", source)
    before = set(source.rglob("*"))
    command = [str(COLCON), "--log-base", str(place / "log"), "build", "--base-paths", str(place / "src")]
    command += ["--build-base", str(place / "build"), "--install-base", str(place / "install")]
    environment = {**os.environ, "COLCON_HOME": str(place / "home"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Finished <<< vla_fleet" in done.stdout
    assert set(source.rglob("*")) == before, "a build leaves the sources as they were"
    return place


@pytest.fixture
def installed(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The install space, found through the ament index."""
    prefix = workspace / "install" / "vla_fleet"
    monkeypatch.setenv("AMENT_PREFIX_PATH", str(prefix))
    return prefix


def test_the_index_finds_package_share_and_launch_files(installed: Path) -> None:
    from ament_index_python.packages import get_package_prefix, get_package_share_directory, get_packages_with_prefixes
    from ament_index_python.resources import get_resource

    assert get_packages_with_prefixes() == {"vla_fleet": str(installed)}
    assert get_package_prefix("vla_fleet") == str(installed)
    content, _ = get_resource("packages", "vla_fleet")
    assert content == ""
    share = Path(get_package_share_directory("vla_fleet"))
    assert (share / "package.xml").read_text() == (ROOT / "package.xml").read_text()
    assert sorted(path.name for path in (share / "launch").iterdir()) == sorted(
        path.name for path in FILES.glob("*.launch.py")
    )


def test_the_executables_are_where_ros2_run_looks(installed: Path) -> None:
    """ros2run takes the executable files of `lib/PACKAGE` below the prefix."""
    found = {path.name for path in (installed / "lib" / "vla_fleet").iterdir() if os.access(path, os.X_OK)}
    assert found == {"edge_node", "sim_robot_node", "vla-fleet"}


def test_what_is_not_code_is_installed_too(installed: Path) -> None:
    (packages,) = (installed / "lib").glob("python*/site-packages")
    for folder in ("cloud_learner/operator/static", "hal/drivers/ros2"):
        kept = [path for path in (ROOT / folder).iterdir() if path.suffix in (".html", ".js", ".css", ".svg", ".xml")]
        assert kept, folder
        for path in kept:
            assert (packages / folder / path.name).exists(), path
    assert not (packages / "launch").exists(), "ROS 2's own package is called launch"


def environment(prefix: Path, tmp_path: Path) -> dict[str, str]:
    """As after sourcing the workspace's setup file."""
    (packages,) = (prefix / "lib").glob("python*/site-packages")
    return {
        **os.environ,
        **ros_environment(tmp_path),
        "PYTHONPATH": str(packages),
        "AMENT_PREFIX_PATH": str(prefix),
        "ROS_HOME": str(tmp_path),
    }


def test_the_setup_file_says_where_things_are(workspace: Path, installed: Path) -> None:
    (packages,) = (installed / "lib").glob("python*/site-packages")
    told = subprocess.run(
        ["sh", "-c", '. install/setup.sh && echo "$AMENT_PREFIX_PATH" && echo "$PYTHONPATH"'],
        cwd=workspace,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert str(installed) in told[0].split(":")
    assert str(packages) in told[1].split(":")


@pytest.mark.parametrize("name", ["edge_node", "vla-fleet"])
def test_an_executable_explains_itself_from_the_install_space(name: str, installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [installed / "lib" / "vla_fleet" / name, "--help"],
        cwd=tmp_path,
        env=environment(installed, tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()


@pytest.mark.parametrize("name", ["edge_node", "sim_robot_node"])
def test_a_node_starts_from_the_install_space_and_ends_when_asked(
    name: str, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import rclpy

    variables = environment(installed, tmp_path)
    for variable in ros_environment(tmp_path):
        monkeypatch.setenv(variable, variables[variable])
    arguments = ["--recipe", "fake"] if name == "sim_robot_node" else []
    arguments += ["--ros-args", "-r", "__ns:=/left", "-r", f"__node:={name}"]
    context = rclpy.Context()
    context.init(domain_id=int(variables["ROS_DOMAIN_ID"]))
    watcher = rclpy.create_node("watcher", context=context)
    with (tmp_path / "node.log").open("w") as log:
        node = subprocess.Popen(
            [installed / "lib" / "vla_fleet" / name, *arguments], cwd=tmp_path, env=variables, stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 60
        while (name, "/left") not in watcher.get_node_names_and_namespaces():
            assert node.poll() is None, (tmp_path / "node.log").read_text()
            assert time.monotonic() < deadline, "the node does not appear in the graph"
            time.sleep(0.1)
        node.send_signal(signal.SIGINT)
        assert node.wait(30) == 0, (tmp_path / "node.log").read_text()
    finally:
        if node.poll() is None:
            node.kill()
            node.wait()
        watcher.destroy_node()
        context.try_shutdown()
