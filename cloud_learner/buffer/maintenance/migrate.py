"""Brings a data directory of the first form (one ZIP file per segment) into the present one, once.

A new ledger is built beside the old one, every segment goes through the store as if it had just come, and at the end
the new ledger takes the old one's name. Until then the old form is untouched, apart from segments that are damaged:
those are moved to `quarantine/` and named. It may be interrupted at any point and started again.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cloud_learner.buffer.files import make_directory, remove_quietly, sync_directory, write_durably
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.maintenance import format1
from cloud_learner.buffer.maintenance import shard_writer as sealer
from cloud_learner.buffer.maintenance.format1 import OldLedger, OldSegment
from cloud_learner.buffer.store.objects import open_objects
from cloud_learner.buffer.store.store import SegmentStore
from wire.errors import CorruptDataError, InvalidDataError, StorageError, storage_error
from wire.messages.all import Evaluation
from wire.types import PolicyVersion, RobotSpec

if TYPE_CHECKING:
    from cloud_learner.buffer.location import BufferLocation

_SEAL_EVERY = 64
"""Segments between two rounds of sealing: the journal stays small meanwhile."""


def migrate(place: BufferLocation, progress: Callable[[str], None]) -> None:
    """Bring `place` into the present form if its `ledger.sqlite` is of the first one; otherwise do nothing.

    `progress` is told in words how far it is and which segments are damaged. Raises `StorageError` when another process
    uses the directory, `DiskFullError` or `NotWritableError`; then it can be started again and goes on where it was.
    """
    old = place.data / "ledger.sqlite"
    found = format1.ledger_format(old)
    leftover = place.data / "segments"
    if found != str(format1.FORMAT) and not (_kept(place).exists() and leftover.exists()):
        return
    with _alone(place):
        # another process may have done it while this one waited for its turn
        if format1.ledger_format(old) == str(format1.FORMAT):
            new = old.with_name("ledger.new.sqlite")
            _fill(place, old, new, progress)
            _swap(old, new, _kept(place))
        if leftover.exists():
            progress("the files of the first form are removed.")
            _remove_tree(leftover)


def _kept(place: BufferLocation) -> Path:
    return place.data / "ledger.format1.sqlite"


def _fill(place: BufferLocation, old_path: Path, new_path: Path, progress: Callable[[str], None]) -> None:
    """Bring everything that is not there yet from the old ledger and its files into the new one."""
    with contextlib.ExitStack() as opened:
        old = OldLedger(old_path)
        opened.callback(old.close)
        new = Ledger.open(str(new_path))
        opened.callback(new.close)
        store = SegmentStore.open(place.journal, open_objects(place.store_place), new)
        opened.callback(store.close)
        _copy_robots(old, new)
        rows = _copy_segments(place, old, new, store, progress)
        _copy_versions(old, new, rows)
        _copy_rest(old, new)


def _copy_robots(old: OldLedger, new: Ledger) -> None:
    specs = {row["hash"]: msgspec.json.decode(row["json"], type=RobotSpec) for row in old.table("specs")}
    for row in old.table("robots"):
        spec = specs.get(row["spec_hash"])
        if new.robot(row["name"]) is None:
            new.see_robot(row["name"], spec, row["clock"], row["first_seen_ns"])
        new.see_robot(row["name"], spec, row["clock"], row["last_seen_ns"])
        if row["clock_offset_ns"]:
            new.set_clock_offset(row["name"], row["clock_offset_ns"], row["last_seen_ns"])


def _copy_segments(
    place: BufferLocation, old: OldLedger, new: Ledger, store: SegmentStore, progress: Callable[[str], None]
) -> list[tuple[int, int]]:
    """Bring the segments over; (old row, new row) of those that are whole, growing."""
    total, now_ns = old.count(), 0
    rows: list[tuple[int, int]] = []
    progress(f"{total} segments of {place.data} are brought into the present form.")
    for done, segment in enumerate(old.segments(), start=1):
        now_ns = max(now_ns, segment.committed_ns)
        known = new.segment(segment.id)
        row = known.row if known else _append(place, segment, store, progress)
        if row is not None:
            rows.append((segment.row, row))
        if done % _SEAL_EVERY == 0:
            sealer.seal(store, new, now_ns, wait_s=30)
        if done % 1000 == 0 or done == total:
            progress(f"{done} of {total} segments, {done - len(rows)} of them damaged.")
    sealer.seal(store, new, now_ns, force=True, wait_s=30)
    return rows


def _append(place: BufferLocation, old: OldSegment, store: SegmentStore, progress: Callable[[str], None]) -> int | None:
    """Put one old segment through the store: its row, or None and it is set aside when it is damaged."""
    path = place.data / "segments" / old.path
    try:
        return store.append(format1.read_segment(path, old.sha256), old.received_ns, old.committed_ns)
    except (CorruptDataError, InvalidDataError) as error:
        aside = place.data / "quarantine" / old.path.replace("/", "-")
        note = f"segment {old.id!r}, row {old.row} of the first form\n{error}\n"
        write_durably(aside.with_name(aside.name + ".txt"), note.encode(), "quarantine")
        try:
            if path.exists() and not aside.exists():
                # a second name: the file is never in neither place, and the first one goes with all others
                os.link(path, aside)
                sync_directory(aside.parent)
        except OSError as failure:
            raise storage_error(failure, "quarantine", aside) from failure
        progress(f"segment {old.id} is damaged and was set aside as {aside}: {error}")
        return None


def _copy_versions(old: OldLedger, new: Ledger, rows: list[tuple[int, int]]) -> None:
    """`rows`: (old row, new row), growing; they differ where damaged segments were left out."""
    for row in old.table("versions"):
        if new.version(row["number"]) is None:
            path = row.pop("path")
            at = bisect.bisect_right(rows, row["newest_segment"], key=lambda pair: pair[0])
            row["newest_segment"] = rows[at - 1][1] if at else 0
            new.commit_version(PolicyVersion(**row), path)


def _copy_rest(old: OldLedger, new: Ledger) -> None:
    for row in old.table("evaluations"):
        facts = {name: row[name] for name in Evaluation.__struct_fields__}
        facts["success"] = msgspec.json.decode(row["success"])
        new.add_evaluation(Evaluation(**facts), row["wall_ns"])
    for row in old.table("applied"):
        new.note_applied(row["robot"], row["version"], row["announced_ns"], row["applied_ns"])
    # events have no name of their own; nobody else writes here, so the first ones are those that are there already
    events = old.table("events")
    copied = len(new.events(limit=len(events) + 1))
    for row in events[copied:]:
        new.add_event(row["time_ns"], row["robot"], row["kind"], row["detail"])


def _swap(old: Path, new: Path, kept: Path) -> None:
    """Give the new ledger the old one's name; the old one stays as `kept`."""
    try:
        format1.checkpoint(new)
        format1.checkpoint(old)
        with open(new, "rb") as file:
            os.fsync(file.fileno())
        if not kept.exists():
            os.link(old, kept)
        elif not kept.samefile(old):
            raise StorageError(f"{kept} is there already, of another ledger. Move it away and start again.")
        sync_directory(old.parent)
        os.replace(new, old)
        sync_directory(old.parent)
    except OSError as error:
        raise storage_error(error, "ledger", old) from error
    remove_quietly(new.with_name(new.name + ".lock"))


def _remove_tree(root: Path) -> None:
    try:
        shutil.rmtree(root)
        sync_directory(root.parent)
    except OSError as error:
        raise storage_error(error, "segments", root) from error


@contextlib.contextmanager
def _alone(place: BufferLocation) -> Iterator[None]:
    """Only one process brings a directory into the present form; another one waits until it is done."""
    path = place.data / "migrate.lock"
    try:
        make_directory(place.data)
        lock = path.open("w")
    except OSError as error:
        raise storage_error(error, "ledger", path) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        remove_quietly(path)
