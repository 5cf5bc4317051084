"""Which tests may not run beside each other, and which begin first, when pytest-xdist shares them out.

The tests of one file run in one process, so that its fixtures are made once. Those of one group do as well: they load
the machine, share something there is one of, or begin with a long import. pytest-xdist's own marks for this are
silently without effect from pytest 9.2 on.
"""

from __future__ import annotations

from fnmatch import fnmatch

import pytest
from xdist.scheduler import LoadScopeScheduling

GROUPS = {
    # whole fleets of real processes, few at a time; each one waits a lot
    "fleets that are killed": ("tests/e2e/test_processes.py", "tests/e2e/test_chaos.py", "*/test_operator_browser.py"),
    "fleets": ("tests/e2e/test_small_fleet.py", "tests/e2e/test_hold.py", "tests/e2e/test_examples.py"),
    "bad networks": ("tests/e2e/test_nat.py", "tests/e2e/test_soak.py"),
    # lerobot's import takes 16 s
    "lerobot": (
        "tests/e2e/test_policies.py",
        "tests/policies/lerobot/*",
        "*/test_lerobot_*.py",
        "tests/benchmarks/test_prefix_age.py",
    ),
    "Ray": ("*/test_ray*.py", "*/test_train_on_ranks.py", "*/test_population.py"),
    # one domain at a time
    "ros": ("*/test_ros2_*.py", "tests/launch/*"),
    # long tests with processes or training of their own: early, so that nobody waits for them at the end
    "policies": ("tests/policies/common/test_runtime.py", "tests/policies/flow/*", "*/test_compilation.py"),
}


def group_of(nodeid: str) -> str:
    """The group of a test, or its file."""
    file = nodeid.split("::")[0]
    return next((name for name, patterns in GROUPS.items() if any(fnmatch(file, p) for p in patterns)), file)


def in_order(items: list[pytest.Item]) -> None:
    """Put the groups first, in the order of `GROUPS`."""
    order = list(GROUPS)
    groups = {item: group_of(item.nodeid) for item in items}
    items.sort(key=lambda item: order.index(groups[item]) if groups[item] in order else len(order))


class GroupScheduling(LoadScopeScheduling):
    """Gives every process one group after the other, in the order of the tests."""

    def __init__(self, config: pytest.Config, log: object = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
