import logging

import pytest

from cloud_learner.training.retry import RetryPause
from wire.clock import ManualClock
from wire.errors import CorruptDataError, FormatError, InvalidDataError, StorageError

S = 10**9


@pytest.fixture
def clock():
    return ManualClock(10**12)


def _attempts(pause, clock, seconds, error=None, attempt_ns=0):
    """How often it is tried in so many seconds, looked at every 50 ms."""
    count, end_ns = 0, clock.now_ns() + seconds * S
    while clock.now_ns() < end_ns:
        if pause.due:
            count += 1
            with pause:
                clock.advance(attempt_ns)
                if error is not None:
                    raise error
        clock.advance(S // 20)
    return count


def test_it_speaks_once_and_again_when_the_reason_changes_or_it_is_over(clock, caplog):
    caplog.set_level(logging.INFO)
    pause = RetryPause("nothing can be read", clock)
    assert _attempts(pause, clock, 60, StorageError("refused")) > 5
    assert _attempts(pause, clock, 60, InvalidDataError("no such database")) > 1
    assert pause.failing
    assert _attempts(pause, clock, 60) > 500 and not pause.failing
    _attempts(pause, clock, 60, StorageError("refused"))
    assert [record.getMessage() for record in caplog.records] == [
        "nothing can be read: refused",
        "nothing can be read: no such database",
        "nothing can be read: that is over.",
        "nothing can be read: refused",
    ]


def test_the_pause_grows_up_to_its_longest_and_begins_anew(clock):
    pause = RetryPause("it", clock, longest_s=5.0)
    # 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, then 5 s each
    assert _attempts(pause, clock, 6, StorageError("x")) == 6
    assert _attempts(pause, clock, 50, StorageError("x")) in (10, 11)
    assert _attempts(pause, clock, 6) > 0
    assert _attempts(pause, clock, 1, StorageError("x")) >= 3


def test_what_keeps_others_waiting_is_tried_a_bounded_share_of_the_time(clock):
    pause = RetryPause("it", clock, longest_s=1.0, times_attempt=4.0)
    assert 9 <= _attempts(pause, clock, 1000, StorageError("silent"), attempt_ns=20 * S) <= 11


def test_what_waiting_does_not_mend_and_what_is_no_fault_of_storage_is_raised(clock):
    pause = RetryPause("it", clock, lasting=(FormatError,))
    for error in (FormatError("format 6"), KeyError("x")):
        with pytest.raises(type(error)), pause:
            raise error
    with pause:
        raise CorruptDataError("only a StorageError")
    assert pause.failing
