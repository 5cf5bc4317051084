"""Whether ranks start again, and whether there is room for them: with no cluster."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from fleet.ray_backend import ranks
from fleet.ray_backend.ranks import RESTARTS, RestartPolicy
from fleet.ray_backend.resources import Node
from tests.extras import needs
from wire.errors import ConfigError, FleetError, InvalidDataError, StorageError

pytestmark = needs("ray")


def died() -> Exception:
    """As Ray Train tells of it."""
    from ray.exceptions import RayActorError
    from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

    return WorkerHealthCheckFailedError("the worker was killed", RayActorError())


LOST = RuntimeError("something\n[gloo] Connection closed by peer [127.0.0.1]:1.")


@pytest.mark.parametrize(
    ("reached", "failures", "said"),
    [
        (7, {1: died()}, "rank 1 died; all ranks go on from gradient step 7 (restart 1 of 3)."),
        (7, {0: LOST, 1: died()}, "rank 1 died; all ranks go on from gradient step 7 (restart 1 of 3)."),
        # what it raised is not why it ended
        (7, {0: StorageError("no answer"), 1: died()}, "rank 1 died; all ranks go on from gradient step 7 (restart 1"),
        (7, {0: died(), 2: died()}, "ranks 0, 2 died; all ranks go on from gradient step 7 (restart 1 of 3)."),
        (0, {1: died()}, "rank 1 died; all ranks begin again: there is no checkpoint yet (restart 1 of 3)."),
        (7, {0: LOST}, "rank 0 failed (RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:1); all ranks go on"),
    ],
)
def test_a_line_says_who_died_and_where_all_go_on(reached: int, failures: Mapping[int, Exception], said: str) -> None:
    assert RestartPolicy(lambda: reached).decide(failures).startswith(said)


@pytest.mark.parametrize("error", [InvalidDataError("the loss is nan"), StorageError("the disk is full")])
def test_what_would_have_ended_one_process_ends_all_at_once(error: FleetError) -> None:
    with pytest.raises(type(error), match=str(error)):
        RestartPolicy(lambda: 7).decide({0: LOST, 1: error})


@pytest.mark.parametrize(("step", "said"), [(7, "that of gradient step 7 stays, and the same"), (0, r"\(none yet\)")])
def test_after_too_many_from_the_same_checkpoint_it_ends_and_says_the_way_out(step: int, said: str) -> None:
    reached = [step + 1] * RESTARTS + [step] * (RESTARTS + 1)
    policy = RestartPolicy(lambda: reached.pop(0))
    for _ in range(2 * RESTARTS):
        policy.decide({1: died()})
    with pytest.raises(FleetError, match=rf"rank 1 died, and the 3 times before .*{said}.*fewer --ranks"):
        policy.decide({1: died()})


class Offered:
    """A cluster with so much in all, of which so much is free."""

    def __init__(self, free: float, *nodes: Mapping[str, float]) -> None:
        self._free, self._nodes = free, nodes

    def nodes(self) -> dict[str, Node]:
        return {str(number): Node(str(number), "box", one) for number, one in enumerate(self._nodes)}

    def free(self, resource: str) -> float:
        return self._free


@pytest.mark.parametrize(
    ("cluster", "gpus", "shared", "said"),
    [
        # two halves are no room for a rank
        (
            Offered(4, {"CPU": 1.5}, {"CPU": 2.5}),
            False,
            True,
            r"4 processors, and Ray has 3 \(box 1, box 2\): say --ra",
        ),
        (
            Offered(1, {"CPU": 8, "GPU": 1}),
            True,
            False,
            r"4 graphics cards, and Ray has 1 \(box 1\): leave --ranks out",
        ),
        (Offered(2, {"CPU": 8}), False, True, r"of which 2 of 8 are free: `ray status` .* say --ranks 2, or add nodes"),
    ],
)
def test_more_ranks_than_there_is_room_for_are_refused(
    cluster: Any, gpus: bool, shared: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_ROOM_S", 0.0)
    with pytest.raises(ConfigError, match=f"4 ranks need .*{said}"):
        ranks._require_room(cluster, 4, gpus, shared)


def test_what_others_leave_in_time_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [1.0, 3.0, 4.0]
    cluster: Any = SimpleNamespace(nodes=Offered(0, {"CPU": 4}).nodes, free=lambda _: free.pop(0))
    ranks._require_room(cluster, 4, gpus=False, shared=True)
    assert not free
