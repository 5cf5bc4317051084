"""The rules of the house, read from the source: who may import whom, what fits into a folder, what a name may be."""

from __future__ import annotations

import ast
import builtins
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("wire", "hal", "policies", "robot_edge", "cloud_learner", "fleet", "benchmarks", "launch")

ALLOWED = {
    "wire": set(),
    "hal": {"wire"},
    "policies": {"wire"},
    "robot_edge": {"wire", "hal", "policies"},
    "cloud_learner": {"wire", "hal.resource", "hal.scheduler", "policies"},
    "fleet": {"wire", "hal", "policies", "robot_edge", "cloud_learner"},
    "benchmarks": {"wire", "hal", "policies", "robot_edge", "cloud_learner", "fleet"},
    "launch": set(),
}
"""room: what it may import besides itself"""

DOORS = {
    "robot_edge.chunking.strategies": ("robot_edge.chunking",),
    "robot_edge.ros2": ("fleet.ros2",),
    "cloud_learner.dispatch": ("cloud_learner.gateway",),
    "cloud_learner.rollout": ("cloud_learner.gateway", "cloud_learner.operator", "fleet", "benchmarks.rollout"),
    # whoever decides on versions, robots and demonstrations reads nothing that a model says of an episode
    "cloud_learner.rewards": ("fleet",),
    "policies.flow.networks": ("policies.flow", "policies.gaussian", "policies.tokens"),
}
"""package: the only ones that may come in"""

UNMIRRORED = {"e2e", "benchmarks", "launch"}
"""folders of tests that mirror no package: whole systems, and rooms that are no packages of the product"""


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path) -> set[str]:
    """Modules of this project that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide which room is meant"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] in ROOMS and name != "launch"}


def files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("room", [room for room in ROOMS if room != "launch"])
def test_imports_go_one_way(room: str) -> None:
    wrong = []
    for path in files(room):
        for name in imports(path):
            own = name.split(".")[0] == room
            if not own and not any(name == ok or name.startswith(f"{ok}.") for ok in ALLOWED[room]):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert files(room), f"no file in {room}"
    assert wrong == []


def runtime_imports(tree: ast.AST, modules: set[str]) -> set[str]:
    """Those of `modules` that a file imports when it or one of its functions runs: not for types alone."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            found |= runtime_imports(ast.Module(node.orelse, []), modules)
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else str(node.module) for name in named}
        found |= runtime_imports(node, modules)
    return found & modules


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, in the order in which they do: one circle for each way back that is met."""
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append([*path[path.index(module) :], module])
        elif module not in done:
            for other in sorted(graph[module]):
                visit(other, [*path, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return found


def test_there_is_no_circle_of_imports() -> None:
    paths = {}
    for room in ROOMS:
        for path in files(room):
            parts = path.relative_to(ROOT).with_suffix("").parts
            paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    modules = set(paths)
    graph = {name: runtime_imports(ast.parse(path.read_text()), modules) - {name} for name, path in paths.items()}
    assert [" -> ".join(circle) for circle in circles(graph)] == []


def test_a_circle_is_found_through_functions_and_not_through_types() -> None:
    code = (
        "from a import b\nif TYPE_CHECKING:\n    import a.c\nelse:\n    import a.d\ndef f():\n    from a.e import g\n"
    )
    assert runtime_imports(ast.parse(code), {"a", "a.b", "a.c", "a.d", "a.e"}) == {"a.b", "a.d", "a.e"}
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c", "a"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_drivers_are_reached_through_the_registry() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files("robot_edge")
        for name in imports(path)
        if name.startswith("hal.drivers")
    ]
    assert wrong == []


@pytest.mark.parametrize("package", DOORS)
def test_who_may_come_in(package: str) -> None:
    doors = (package, *DOORS[package])
    assert (ROOT / package.replace(".", "/")).is_dir()
    wrong = []
    for path in modules():
        here = ".".join(path.relative_to(ROOT).parent.parts)
        for name in imports(path):
            if f"{name}.".startswith(f"{package}.") and not any(f"{here}.".startswith(f"{door}.") for door in doors):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def modules() -> list[Path]:
    return [path for room in ROOMS for path in files(room)]


def packages() -> list[Path]:
    """Folders of the product and the benchmarks; ROS 2's launch files are no package."""
    return sorted({path.parent for path in modules()} - {ROOT / "launch"})


def classes() -> Iterator[tuple[str, list[str], str]]:
    """(name, names of its bases, file) of every class, nested and private ones too."""
    for path in modules():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
                yield node.name, bases, str(path.relative_to(ROOT))


@pytest.mark.parametrize("folder", packages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_package_is_small_and_says_what_lives_there(folder: Path) -> None:
    count = sum(path.name != "__init__.py" for path in folder.glob("*.py"))
    assert count <= 12, f"{count} modules in one folder: divide it by subject"
    said = ast.get_docstring(parsed(folder / "__init__.py"))
    assert said, "a docstring in __init__.py says what lives there and who may come in"
    assert len([line for line in said.splitlines() if line]) <= 3, "three lines are enough"


def test_a_class_has_a_name_of_its_own() -> None:
    where: dict[str, list[str]] = {}
    for name, _, file in classes():
        where.setdefault(name, []).append(file)
    assert {name: found for name, found in where.items() if len(found) > 1} == {}


def test_exceptions_are_called_errors() -> None:
    found = list(classes())
    errors = {
        name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException)
    }
    more = {""}
    while more:
        more = {name for name, bases, _ in found if errors & set(bases)} - errors
        errors |= more
    wrong = [f"{file}: {name}" for name, _, file in found if name in errors and not name.endswith("Error")]
    assert len(errors) > 80
    assert wrong == []


def test_a_role_is_no_bare_string() -> None:
    wrong = []
    for path in modules():
        for node in ast.walk(parsed(path)):
            given: list[ast.expr] = []
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                given = sides if any(getattr(side, "attr", getattr(side, "id", "")) == "role" for side in sides) else []
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Hello", "ProcessSpec"):
                given = [*node.args[1:2], *(named.value for named in node.keywords if named.arg == "role")]
            if any(isinstance(one, ast.Constant) and isinstance(one.value, str) for one in given):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert wrong == [], "say wire.types.Role"


def test_tests_mirror_the_packages() -> None:
    tests = ROOT / "tests"
    wrong = []
    for path in sorted(tests.rglob("test_*.py")):
        folder = path.parent.relative_to(tests)
        if not UNMIRRORED & set(folder.parts[:1]) and not (ROOT / folder).is_dir():
            wrong.append(str(path.relative_to(ROOT)))
    assert wrong == []


def test_the_rooms_of_the_buffer_stand_on_each_other() -> None:
    floors = ["ledger", "store", "maintenance", "sampling", "loading", "lerobot"]
    wrong = []
    for path in files("cloud_learner/buffer"):
        here = path.relative_to(ROOT).parts[2]
        for name in imports(path):
            there = name.removeprefix("cloud_learner.buffer.").partition(".")[0]
            if here in floors and there in floors and floors.index(there) > floors.index(here):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_the_rollout_is_logic_alone() -> None:
    allowed = ("cloud_learner.rollout.", "wire.errors.", "wire.weights.action_difference.")
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files("cloud_learner/rollout")
        for name in imports(path)
        if not name.startswith(allowed)
    ]
    assert wrong == []


def test_the_rule_itself_catches_a_wrong_import(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        "def f():\n    from robot_edge.control.loop import ControlLoop\n    import hal.drivers.metaworld.robot\n"
    )
    assert imports(bad) == {"robot_edge.control.loop.ControlLoop", "hal.drivers.metaworld.robot"}


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("robot_edge.control.loop", ("torch", "zarr", "sqlalchemy", "mujoco", "fastapi")),
        ("robot_edge.runtime.process_group", ("torch", "zarr", "sqlalchemy", "mujoco", "fastapi")),
        ("fleet.cli.__main__", ("torch", "zarr", "mujoco", "fastapi")),
        # numpy begins threads, and a process with threads cannot be forked
        ("fleet.launch.template", ("numpy", "torch")),
        ("fleet.config.recipes", ("torch", "mujoco", "metaworld")),
        ("wire.transport.zmq_channel", ("torch", "cv2")),
        ("hal.registry", ("torch", "mujoco", "cv2")),
        ("fleet.config.overrides", ("torch", "mujoco", "zarr")),
        ("policies.interface.registry", ("torch", "transformers", "lerobot", "safetensors")),
        # every process asks a kind of policy for its defaults
        ("policies.flow.factory", ("torch",)),
        ("policies.flow.shared.factory", ("torch",)),
        ("policies.gaussian.factory", ("torch",)),
        ("policies.lerobot.factory", ("torch", "transformers", "lerobot")),
        ("policies.tokens.factory", ("torch",)),
        ("cloud_learner.rewards.config", ("torch", "lerobot", "transformers")),
    ],
)
def test_a_light_process_stays_light(module: str, forbidden: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*[m for m in {forbidden!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == []


def test_files_stay_small() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for room in ROOMS
        for path in files(room)
        if (count := len(path.read_text().splitlines())) > 400
    }
    assert long == {}
