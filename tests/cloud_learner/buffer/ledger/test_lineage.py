"""Which episodes a policy version has seen, and which versions have seen an episode."""

import numpy as np
import pytest

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import Journaled
from tests.cloud_learner.buffer.synthetic import fake_episode, fake_spec
from wire.errors import InvalidDataError
from wire.types import PolicyVersion

SPEC = fake_spec()


@pytest.fixture
def ledger(ledger_place):
    ledger = Ledger.open(ledger_place)
    ledger.see_robot("r1", SPEC, "clock", 5)
    yield ledger
    ledger.close()


def _episodes(ledger, count):
    """Enter episodes e1, e2, ...; their numbers are 1, 2, ..."""
    for number in range(1, count + 1):
        (segment,) = fake_episode(SPEC, f"e{number}", steps=2)
        ledger.commit_segments([(segment, Journaled(1, 0, 100, "0" * 64), 10)], 11)


def _version(number, parent):
    return PolicyVersion(number, f"{number:064x}", 10, parent, 100, 50, 7, 123)


def test_versions_are_entered_once(ledger):
    assert ledger.newest_version() is None
    assert ledger.versions() == ()
    one, two = _version(1, 0), _version(2, 1)
    ledger.commit_version(one, "1.safetensors")
    with pytest.raises(InvalidDataError, match="version 1"):
        ledger.commit_version(one, "1.safetensors")
    ledger.commit_version(two, "2.safetensors")
    assert ledger.newest_version().version == two
    assert ledger.version(1).version == one
    assert ledger.version(1).path == "1.safetensors"
    assert ledger.version(3) is None
    assert [row.version.number for row in ledger.versions()] == [1, 2]


def test_a_version_knows_what_its_ancestors_saw(ledger):
    """1 - 2 - 4 and a branch 2 - 3 - 5 that began anew from a checkpoint."""
    _episodes(ledger, 7)
    for number, parent, trained in ((1, 0, [1, 2]), (2, 1, [3]), (3, 2, [4]), (4, 2, [5, 4]), (5, 3, []), (6, 0, [7])):
        ledger.commit_version(_version(number, parent), f"{number}", trained)
    assert ledger.episodes_of_version(1) == ("e1", "e2")
    assert ledger.episodes_of_version(2) == ("e1", "e2", "e3")
    assert ledger.episodes_of_version(3) == ledger.episodes_of_version(5) == ("e1", "e2", "e3", "e4")
    assert ledger.episodes_of_version(4) == ("e1", "e2", "e3", "e4", "e5")
    assert ledger.episodes_of_version(6) == ("e7",)
    assert ledger.episodes_of_version(99) == ()
    assert ledger.known_to(4) == {1, 2, 3, 4, 5}
    assert ledger.known_to(0) == set()
    assert ledger.versions_of_episode("e1") == (1, 2, 3, 4, 5)
    assert ledger.versions_of_episode("e3") == (2, 3, 4, 5)
    # both branches drew it first, each for itself
    assert ledger.versions_of_episode("e4") == (3, 4, 5)
    assert ledger.versions_of_episode("e5") == (4,)
    assert ledger.versions_of_episode("e6") == ledger.versions_of_episode("nothing") == ()


def test_an_episode_is_first_drawn_once_on_every_way(ledger):
    """A trainer that forgot what it knew names old episodes again; both directions agree with a walk by hand."""
    rng = np.random.default_rng(5)
    _episodes(ledger, 40)
    parents, seen = {}, {0: set()}
    for number in range(1, 30):
        parents[number] = int(rng.integers(max(0, number - 4), number))
        drawn = rng.integers(1, 40, int(rng.integers(0, 6))).tolist()
        ledger.commit_version(_version(number, parents[number]), f"{number}", drawn)
        seen[number] = seen[parents[number]] | set(drawn)
    for number in range(1, 30):
        assert ledger.known_to(number) == seen[number]
        assert ledger.episodes_of_version(number) == tuple(f"e{n}" for n in sorted(seen[number]))
    for episode in range(1, 41):
        expected = tuple(number for number in range(1, 30) if episode in seen[number])
        assert ledger.versions_of_episode(f"e{episode}") == expected
    # one row where an episode is new, none where an ancestor had it
    with ledger.reading() as connection:
        rows = connection.exec_driver_sql("SELECT version, episode FROM trained").fetchall()
    assert rows
    assert all(episode not in seen[parents[version]] for version, episode in rows)


def test_a_version_trained_on_what_is_not_here_is_refused_whole(ledger):
    _episodes(ledger, 2)
    with pytest.raises(InvalidDataError, match="no episode of number 3"):
        ledger.commit_version(_version(1, 0), "1", [1, 3, 9])
    assert ledger.version(1) is None
    ledger.commit_version(_version(1, 0), "1", (2, 1, 2))
    assert ledger.known_to(1) == {1, 2}


def test_a_long_line_of_versions_is_walked(ledger):
    _episodes(ledger, 3)
    for number in range(1, 301):
        ledger.commit_version(_version(number, number - 1), f"{number}", {1: [1], 150: [2], 300: [3]}.get(number, ()))
    assert ledger.known_to(300) == {1, 2, 3}
    assert ledger.versions_of_episode("e2") == tuple(range(150, 301))
    assert ledger.versions_of_episode("e1") == tuple(range(1, 301))


def test_a_version_that_is_its_own_ancestor_ends_the_walk(ledger):
    _episodes(ledger, 2)
    ledger.commit_version(_version(1, 2), "1", [1])
    ledger.commit_version(_version(2, 1), "2", [2])
    assert ledger.known_to(1) == ledger.known_to(2) == {1, 2}
    assert ledger.versions_of_episode("e1") == (1, 2)
