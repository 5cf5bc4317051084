"""What the documents say is true: their files exist, their code runs, their figures were filled in."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import typer

from hal.conformance import check_robot
from hal.registry import make_operator, make_robot
from policies.conformance.check import check_policy
from tests.samples import states_only

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "examples")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere_and_nothing_is_left_to_fill_in(document: Path) -> None:
    text = document.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
    assert "@@" not in text


def test_a_walk_names_files_and_functions_that_exist_and_counts_its_files() -> None:
    first, *walks = (ROOT / "docs" / "architecture.md").read_text().split("\n## Walk ")
    carriers = set(re.findall(r"`([\w/]+\.py)`: ", first.split("\n## What only carries")[1]))
    assert all((ROOT / path).is_file() for path in carriers)
    assert len(walks) == 3
    for walk in walks:
        items = re.findall(r"^(\d+)\. `([\w/]+\.py): ([\w., ]+)` ", walk, re.MULTILINE)
        assert [int(number) for number, _, _ in items] == list(range(1, len(items) + 1))
        assert len(items) == len(re.findall(r"^\d+\.", walk, re.MULTILINE)), "each item is `path: names` and a sentence"
        for _, path, names in items:
            missing = set(names.split(", ")) - _definitions(ROOT / path)
            assert not missing, f"{path} has no {missing}"
        said = re.search(r"^\*\*(\d+) files\*\*, carried by (\d+): (.+)$", walk, re.MULTILINE)
        assert said, "a walk ends with the number of its files, and what it is carried by"
        opened, carried = {path for _, path, _ in items}, set(re.findall(r"`([\w/]+\.py)`", said[3]))
        assert (int(said[1]), int(said[2])) == (len(opened), len(carried))
        assert carried <= carriers and not opened & carriers


def _definitions(path: Path) -> set[str]:
    """Classes, functions and variables of a module, and methods as `Class.method`."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{method.name}" for method in node.body if isinstance(method, ast.FunctionDef)}
    return found


def test_what_contributing_says_to_touch_is_there() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().split("**What to touch.**")[1].split("**Style.**")[0]
    named = re.findall(r"`([\w/]+/[\w.]*)`", table)
    assert len(named) > 15
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_readme_names_no_command_that_is_not_there() -> None:
    from fleet.cli.__main__ import app

    known = _commands(app)
    # the longest first: `policy tokenizer fit` is no command called `policy tokenizer`
    groups = "(?:policy tokenizer|policy|buffer|quarantine|rewards)"
    for document in DOCUMENTS:
        used = set(re.findall(rf"vla-fleet ({groups} [a-z-]+|[a-z][a-z-]*[a-z])\b", document.read_text()))
        used -= {"is", "that", "has", "does", "reads"}
        assert used <= known, f"{document.name}: {used - known}"


def _commands(app: typer.Typer, within: str = "") -> set[str]:
    """Every command as it is typed, and every group."""
    known = {
        within + (command.name or command.callback.__name__.replace("_", "-")) for command in app.registered_commands
    }
    for group in app.registered_groups:
        name = f"{within}{group.typer_instance.info.name}"
        known |= {name} | _commands(group.typer_instance, f"{name} ")
    return known


def test_the_example_robot_keeps_the_rules(examples: None) -> None:
    import own_robot

    report = check_robot(own_robot.Slider, "reach")
    assert report.passed, str(report)
    robot = make_robot("slider", None)
    operator = make_operator("slider", robot)
    robot.connect()
    robot.reset("reach", 3)
    for _ in range(150):
        if robot.write(operator.propose(robot.read())).success:
            break
    else:
        pytest.fail("the coach does not reach the mark")


def test_the_example_policy_keeps_the_rules(examples: None) -> None:
    import own_policy

    recipe = own_policy.regression()
    failed = [check for check in check_policy(lambda: own_policy.Regression(recipe.spec, 0)) if not check.passed]
    assert failed == []


def test_the_example_recipes_can_be_named(examples: None) -> None:
    from fleet.config.recipes import get_recipe

    assert get_recipe("own_robot:slider").robot == "slider"
    policy = get_recipe("own_policy:regression").make_policy(get_recipe("state").spec, 0)
    policy.set_normalization(states_only(np.random.default_rng(0).normal(size=(50, 39))))
    assert policy.load(policy.save(), 4) is None
    assert policy.version == 4
