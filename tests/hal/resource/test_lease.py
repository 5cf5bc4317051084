from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.resource.lease import Leases, Priority
from wire.errors import RejectedError
from wire.types import Lease

S = 1_000_000_000


def test_a_lease_lives_while_it_is_renewed() -> None:
    leases = Leases()
    lease, preempted = leases.acquire("r", "main", "rollout", Priority.rollout, 15 * S, 0)
    assert (lease.robot, lease.holder, lease.number, lease.expires_ns, preempted) == ("r", "main", 1, 15 * S, None)
    assert leases.renew("r", 1, 10 * S).expires_ns == 25 * S
    assert leases.expire(24 * S) == []
    assert leases.of("r", 24 * S) is not None
    assert leases.of("r", 25 * S) is None
    assert [ended.number for ended in leases.expire(25 * S)] == [1]
    assert leases.expire(25 * S) == []
    with pytest.raises(RejectedError, match="lease 1 has ended"):
        leases.renew("r", 1, 26 * S)


def test_a_heartbeat_never_shortens_it() -> None:
    leases = Leases()
    leases.acquire("r", "main", "rollout", 10, 15 * S, 10 * S)
    assert leases.renew("r", 1, 5 * S).expires_ns == 25 * S


def test_the_same_priority_is_refused_and_says_who_and_until_when() -> None:
    leases = Leases()
    leases.acquire("r", "main", "rollout", 20, 15 * S, 0)
    with pytest.raises(RejectedError, match=r"held by 'main' for rollout \(priority 20\) for another 11\.0 s"):
        leases.acquire("r", "other", "evaluation", 20, S, 4 * S)
    with pytest.raises(RejectedError):
        leases.acquire("r", "other", "evaluation", 19, S, 4 * S)
    # it was as if nothing had been asked
    assert leases.of("r", 4 * S) == Lease("r", "main", "rollout", 20, 15 * S, 1, 15 * S)
    assert leases.last_number == 1


def test_a_higher_one_preempts_and_the_old_number_is_void() -> None:
    leases = Leases()
    old, _ = leases.acquire("r", "main", "rollout", Priority.rollout, 15 * S, 0)
    new, preempted = leases.acquire("r", "ann", "operator", Priority.operator, 5 * S, S)
    assert preempted == old
    assert new.number == 2
    with pytest.raises(RejectedError, match="lease 1 of robot 'r' has ended; 'ann' holds it by lease 2"):
        leases.renew("r", 1, 2 * S)
    with pytest.raises(RejectedError):
        leases.release("r", 1, 2 * S)
    _, preempted = leases.acquire("r", "page", "estop", Priority.estop, 5 * S, 2 * S)
    assert preempted == new
    assert leases.expire(100 * S)[0].holder == "page"


def test_the_holder_may_ask_again() -> None:
    leases = Leases()
    leases.acquire("r", "main", "rollout", 10, S, 0)
    again, preempted = leases.acquire("r", "main", "rollout", 10, S, 0)
    assert (again.number, preempted) == (2, None)


def test_only_its_own_number_renews_a_lease() -> None:
    leases = Leases()
    leases.acquire("r", "main", "rollout", 10, S, 0)
    for number in (0, -1, 2):
        with pytest.raises(RejectedError, match=f"lease {number} of robot 'r' has ended; 'main' holds it by lease 1"):
            leases.renew("r", number, 0)
    assert leases.all()[0].expires_ns == S


def test_release_by_number_or_by_whoever() -> None:
    leases = Leases()
    leases.acquire("r", "main", "rollout", 10, S, 0)
    assert leases.release("r", 0, 0).number == 1
    with pytest.raises(RejectedError, match="not held by anybody"):
        leases.release("r", 0, 0)
    leases.acquire("r", "main", "rollout", 10, S, 0)
    assert leases.release("r", 2, 0).number == 2
    assert leases.expire(10 * S) == []
    assert leases.all() == ()


def test_one_that_ran_out_unnoticed_is_told_when_another_is_given() -> None:
    leases = Leases()
    leases.acquire("r", "main", "rollout", 80, S, 0)
    _, preempted = leases.acquire("r", "other", "rollout", 10, S, 2 * S)
    assert preempted is None
    assert [lease.holder for lease in leases.expire(2 * S)] == ["main"]


def test_numbers_go_on_after_a_restart() -> None:
    leases = Leases(last_number=41)
    assert leases.acquire("r", "main", "rollout", 10, S, 0)[0].number == 42
    leases.restore(Lease("q", "ann", "operator", 80, 9 * S, 50, 5 * S))
    assert leases.renew("q", 50, 6 * S).expires_ns == 11 * S
    assert leases.acquire("p", "main", "rollout", 10, S, 0)[0].number == 51
    assert [lease.robot for lease in leases.all()] == ["p", "q", "r"]
    assert [lease.robot for lease in leases.expire(11 * S)] == ["r", "q", "p"]


actions = st.lists(
    st.tuples(
        st.sampled_from(("acquire", "renew", "release", "expire")),
        st.sampled_from(("r", "q")),
        st.sampled_from(("main", "canary", "ann")),
        st.sampled_from((10, 20, 80)),
        st.integers(0, 8),
        st.integers(1, 6),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(actions)
@pytest.mark.slow
def test_no_robot_ever_has_two_holders(steps: list[tuple[str, str, str, int, int, int]]) -> None:
    """Kept account of apart from the leases: (robot, number) is live from acquire to release, expiry or preemption."""
    leases = Leases()
    live: dict[str, Lease] = {}
    now_ns, numbers = 0, [0]
    for action, robot, holder, priority, wait, ttl in steps:
        now_ns += wait
        mine = live.get(robot)
        held = mine is not None and mine.expires_ns > now_ns
        try:
            if action == "acquire":
                lease, preempted = leases.acquire(robot, holder, "x", priority, ttl, now_ns)
                assert not held or holder == mine.holder or priority > mine.priority  # type: ignore[union-attr]
                assert preempted == (mine if held and holder != mine.holder else None)  # type: ignore[union-attr]
                assert lease.number > numbers[-1]
                numbers.append(lease.number)
                live[robot] = lease
            elif action == "renew":
                lease = leases.renew(robot, mine.number if mine else 1, now_ns)
                assert held
                assert lease.expires_ns >= now_ns + lease.ttl_ns
                live[robot] = lease
            elif action == "release":
                leases.release(robot, mine.number if mine else 1, now_ns)
                assert held
                del live[robot]
            else:
                for ended in leases.expire(now_ns):
                    assert ended.expires_ns <= now_ns
                    if live.get(ended.robot) == ended:
                        del live[ended.robot]
        except RejectedError:
            assert action == "acquire" or not held
            assert action != "acquire" or held
        for name in ("r", "q"):
            current = leases.of(name, now_ns)
            expected = live.get(name)
            assert current == (expected if expected is not None and expected.expires_ns > now_ns else None)
