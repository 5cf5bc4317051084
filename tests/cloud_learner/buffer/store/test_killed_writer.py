"""A gateway that is killed with -9 again and again loses nothing it acknowledged and stores nothing twice.

The writer takes segments, seals them, forgets old episodes, rewrites shards and removes what is not needed. One process
imports everything and forks the writers, of which each dies somewhere: half of them right before, in the middle of, or
after a call that changes a file; the others at any moment.
"""

import faulthandler
import itertools
import os
import pathlib
import random
import select
import signal
import subprocess
import sys
import threading
import time
import traceback

import pytest

from cloud_learner.buffer.location import BufferLocation
from cloud_learner.buffer.maintenance import maintenance as upkeep
from cloud_learner.buffer.maintenance.shard_writer import seal
from cloud_learner.gateway.storage.ingest import Ingest, ReceivedSegment
from tests.cloud_learner.buffer.synthetic import fake_episode, fake_spec, same_segment

KILLS = 60
CHECK_EVERY = 40
HANGS_S = 60
STEPS, SEGMENT_STEPS = 24, 8
SPEC = fake_spec(1, size=16)
KEPT_BYTES = 40_000


def _episode(number):
    return fake_episode(SPEC, f"e{number}", steps=STEPS, segment_steps=SEGMENT_STEPS, seed=number, actor=[0] * STEPS)


def _die_at(at):
    """Have this process die at the `at`th call that changes a file, about half of the time with half of it done."""
    # objects are put by several threads
    calls, chance, lock = itertools.count(1), random.Random(at), threading.Lock()

    def watch(name, part=None):
        real = getattr(os, name)

        def call(*args):
            with lock:
                here = next(calls) == at
            if here:
                try:
                    if part is not None and chance.random() < 0.7:
                        part(real, *args)
                    elif chance.random() < 0.5:
                        real(*args)
                finally:
                    os.kill(os.getpid(), signal.SIGKILL)
            # a killed process loses nothing that it wrote, flushed or not
            return None if "sync" in name else real(*args)

        setattr(os, name, call)

    watch("pwrite", lambda real, fd, data, at: real(fd, data[: chance.randrange(len(data))], at))
    for name in ("fsync", "fdatasync", "replace", "unlink", "ftruncate"):
        watch(name)


def _write(root, out, seed):
    """Work until killed; every acknowledgement is a line in `out`."""
    chance = random.Random(seed)
    ledger, store = BufferLocation(root).open_writer()
    ledger.see_robot("r1", SPEC, "clock", 1)
    ingest = Ingest(ledger, store)
    ingest.open()
    # what was committed last comes again, as after an acknowledgement that was lost
    newest = ledger.episodes(limit=1)
    number = max(0, int(newest[0].id[1:]) - 1) if newest else 0
    # nothing seems older than it is: the clock of the machine goes on
    now_ns = time.monotonic_ns()
    while True:
        # one by one, or all of some episodes in one go
        several = [one for more in range(chance.randrange(3)) for one in _episode(number + more)]
        for together in [several] if several else [[one] for one in _episode(number)]:
            results = ingest.accept_all([ReceivedSegment("r1", segment, now_ns) for segment in together])
            for segment, result in zip(together, results, strict=True):
                os.write(out, f"{result.outcome} {segment.id}\n".encode())
        number += max(1, len(several) * SEGMENT_STEPS // STEPS)
        kind = chance.random()
        if kind < 0.4:
            seal(store, time.monotonic_ns(), force=True)
        elif kind < 0.6:
            upkeep.prune(ledger, upkeep.Retention(max_bytes=KEPT_BYTES), time.time_ns())
            upkeep.drop_dead(store)
        elif kind < 0.75:
            upkeep.compact(store, time.monotonic_ns())


def _check(root, acknowledged):
    """Everything that was acknowledged is there, once and to the last bit, or was forgotten on purpose."""
    ledger, store = BufferLocation(root).open_writer()
    rows = ledger.segments_after(0, limit=10**6)
    ids = [row.id for row in rows]
    assert len(ids) == len(set(ids))
    episodes = {name.split("/")[0] for name in acknowledged}
    forgotten = {name for name in episodes if ledger.episode(name).pruned_ns}
    assert {name for name in acknowledged if name.split("/")[0] not in forgotten} <= set(ids)
    assert not {row.episode for row in rows} & forgotten
    found = store.read([row.row for row in rows])
    assert found.damaged == {} and found.elsewhere == ()
    for row in rows:
        number, index = row.id[1:].split("/")
        assert same_segment(found.segments[row.row], _episode(int(number))[int(index)])
    assert list(upkeep.verify(store)) == []
    assert {shard.state for shard in ledger.shards()} <= {"sealed"}
    assert set(store.journal.numbers()) == ledger.journals()
    totals = ledger.totals()
    assert totals.duplicated_steps == 0 and totals.steps == len(ids) * SEGMENT_STEPS
    left = [path for path in root.rglob("*.part") if path.is_file()]
    assert left == []
    ledger.close()
    return len(ids), len(forgotten), len(ledger.shards())


def _fork(work):
    """The pid of a child that does `work` and ends with status 0 when it succeeds, in time."""
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        try:
            work()
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    return child


def lives(root, kills):
    """Called in a process of its own: writers live and die here, acknowledgements go to standard output."""
    chance, acknowledged = random.Random(0), []
    for life in range(kills):
        heard, out = os.pipe()

        def work(life=life, out=out):
            if life % 2:
                _die_at(int(chance.expovariate(1 / 60)) + 1)
            _write(root, out, life)

        writer = _fork(work)
        os.close(out)
        with open(heard, "rb") as lines:
            if life % 2 == 0:
                # anywhere in the work after so many segments: the chance is in the time, not in the progress
                for _ in range(int(chance.expovariate(1 / 8))):
                    acknowledged.append(lines.readline())
                select.select([lines], [], [], chance.uniform(0.0, 0.1))
                time.sleep(chance.uniform(0.0, 0.03))
                os.kill(writer, signal.SIGKILL)
            else:
                chance.expovariate(1)
            acknowledged += lines.readlines()
        _, status = os.waitpid(writer, 0)
        assert os.WIFSIGNALED(status), status
        if life % CHECK_EVERY == CHECK_EVERY - 1:
            names = {line.split()[1].decode() for line in acknowledged}
            _, status = os.waitpid(_fork(lambda names=names: print(*_check(root, names), file=sys.stderr)), 0)
            assert status == 0, f"after life {life}"
    sys.stdout.buffer.writelines(acknowledged)


@pytest.mark.slow
def test_everything_acknowledged_survives_kill_9(tmp_path):
    code = f"import sys, pathlib; sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r}); " + (
        f"from {pathlib.Path(__file__).stem} import lives; lives(pathlib.Path({str(tmp_path)!r}), {KILLS})"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    said = [line.split() for line in done.stdout.splitlines()]
    assert {outcome for outcome, _ in said} == {"stored", "duplicate"}
    stored, forgotten, shards = _check(tmp_path, {segment for _, segment in said})
    assert len({segment for _, segment in said}) > KILLS
    assert stored > 10 and forgotten > 2 and shards > 0
