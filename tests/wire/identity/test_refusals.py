"""Refusals are counted without end and told within bounds."""

from __future__ import annotations

import pytest

from wire.identity.refusals import AddressLimit, RefusalReason, Refusals


def test_an_address_has_so_many_at_once_then_one_every_so_often() -> None:
    now = [0.0]
    limit = AddressLimit(3, 2.0, lambda: now[0])
    assert [limit.take("a") for _ in range(5)] == [True, True, True, False, False]
    assert limit.take("b")
    now[0] = 2.0
    assert [limit.take("a") for _ in range(2)] == [True, False]
    now[0] = 1000.0
    assert [limit.take("a") for _ in range(4)] == [True, True, True, False]


def test_a_million_addresses_are_not_remembered() -> None:
    limit = AddressLimit(1, 1e9)
    for number in range(20_000):
        assert limit.take(str(number))
    assert len(limit._free_s) <= 1000


def test_what_is_refused_is_counted_and_told_within_bounds(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    for number in range(10_000):
        refusals.note(RefusalReason.unknown_key, f"robot-{number}", "no key", "10.0.0.1")
    assert refusals.counts == {RefusalReason.unknown_key: 10_000}
    news = refusals.pop_news()
    assert 1 <= len(news) <= 25 and news[0] == ("robot-0", "no key")
    assert len(caplog.records) == len(news)
    assert refusals.pop_news() == []
    for number in range(10_000):
        refusals.note(RefusalReason.bad_token, "unknown", "no token", f"10.0.{number // 250}.{number % 250}")
    assert len(refusals.pop_news()) <= 1000, "many strangers, and nobody reads"
