"""The ledger: which robots, episodes, segments, versions and measurements exist. One SQLite file, one writer.

The gateway writes; the trainer and the command line read the same file meanwhile. A row is on the device when the
function that wrote it returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.sqlite import insert

from cloud_learner.buffer import tables
from cloud_learner.buffer.control import count_interventions, summarise_control
from cloud_learner.buffer.rows import (
    AppliedRow,
    EpisodeRow,
    EvaluationRow,
    EventRow,
    RobotRow,
    SegmentRow,
    Stored,
    Totals,
    VersionRow,
)
from cloud_learner.buffer.totals import read_totals
from wire.errors import Corrupt, DiskFull, InvalidData, StorageError
from wire.messages import Evaluation, Segment
from wire.types import PolicyVersion, RobotSpec

_segments, _episodes = tables.segments, tables.episodes


class Ledger:
    """An opened ledger. Get one from `Ledger.open`; it may be used from several threads."""

    def __init__(self, engine: sa.Engine, path: Path) -> None:
        self._engine = engine
        self.path = path

    @classmethod
    def open(cls, path: Path, *, read_only: bool = False) -> Ledger:
        """Open the ledger at `path`; create it unless `read_only`.

        Raises `StorageError` when there is none to read or it has another format, `Corrupt` when the file is no ledger.
        """
        if read_only and not path.exists():
            raise StorageError(f"no ledger at {path}: start the gateway there first, or choose another --data.")
        ledger = cls(tables.open_engine(path, read_only), path)
        try:
            ledger._check_format(read_only)
        except BaseException:
            ledger.close()
            raise
        return ledger

    def close(self) -> None:
        self._engine.dispose()

    def _check_format(self, read_only: bool) -> None:
        scope = self._reading() if read_only else self._writing()
        with scope as connection:
            names = set(sa.inspect(connection).get_table_names())
            if not names and not read_only:
                tables.metadata.create_all(connection)
                connection.execute(tables.meta.insert().values(key="format", value=str(tables.FORMAT)))
                return
            query = sa.select(tables.meta.c.value).where(tables.meta.c.key == "format")
            found = connection.scalar(query) if "meta" in names else None
        if found != str(tables.FORMAT):
            raise StorageError(
                f"ledger {self.path} has format {found or 'unknown'}, this vla-fleet reads format {tables.FORMAT}: "
                "install the vla-fleet that wrote it, or choose a fresh --data directory."
            )

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        with self._explained(), self._engine.connect() as connection:
            yield connection

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        options = {"writing": True}
        engine = self._engine.execution_options(**options)
        with self._explained(), engine.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sa.exc.DBAPIError as error:
            reason = str(error.orig)
            if "disk is full" in reason:
                raise DiskFull(
                    f"ledger: no space left for {self.path}. Free some room or choose another --data directory."
                ) from error
            if "malformed" in reason or "not a database" in reason:
                raise Corrupt(f"ledger {self.path}: {reason}. Restore it from a backup.") from error
            raise StorageError(f"ledger {self.path}: {reason}.") from error

    # --- robots ---------------------------------------------------------------------------------------------------

    def see_robot(self, name: str, spec: RobotSpec | None, clock: str, seen_ns: int) -> None:
        """Note that `name` is here, with its spec if it brought one."""
        seen: dict[str, Any] = {"clock": clock, "last_seen_ns": seen_ns}
        if spec is not None:
            seen["spec_hash"] = spec.hash
        with self._writing() as connection:
            if spec is not None:
                text = msgspec.json.encode(spec).decode()
                connection.execute(insert(tables.specs).values(hash=spec.hash, json=text).on_conflict_do_nothing())
            row = insert(tables.robots).values(name=name, first_seen_ns=seen_ns, **seen)
            connection.execute(row.on_conflict_do_update(index_elements=["name"], set_=seen))

    def set_clock_offset(self, name: str, offset_ns: int) -> None:
        """Store the measured offset of a robot's clock: gateway time minus robot time."""
        robots = tables.robots
        with self._writing() as connection:
            connection.execute(sa.update(robots).where(robots.c.name == name).values(clock_offset_ns=offset_ns))

    def robot(self, name: str) -> RobotRow | None:
        rows = self._select(sa.select(tables.robots).where(tables.robots.c.name == name))
        return RobotRow(**rows[0]) if rows else None

    def robots(self) -> tuple[RobotRow, ...]:
        """All robots, by name."""
        return tuple(RobotRow(**row) for row in self._select(sa.select(tables.robots).order_by("name")))

    def spec(self, spec_hash: str) -> RobotSpec | None:
        """The spec with this hash, if any robot ever announced it."""
        rows = self._select(sa.select(tables.specs.c.json).where(tables.specs.c.hash == spec_hash))
        return msgspec.json.decode(rows[0]["json"], type=RobotSpec) if rows else None

    # --- episodes and segments ------------------------------------------------------------------------------------

    def commit_segment(self, segment: Segment, stored: Stored, received_ns: int, committed_ns: int) -> bool:
        """Enter a segment whose file is on disk, and what it adds to its episode, in one transaction.

        Returns False, and changes nothing, if its id was there. Raises `InvalidData` if its episode is known with
        another robot, task, spec or source, or its spec is unknown.
        """
        episode = segment.episode
        with self._writing() as connection:
            if connection.scalar(sa.select(_segments.c.row).where(_segments.c.id == segment.id)) is not None:
                return False
            self._require_spec(connection, episode.spec_hash)
            facts = {name: getattr(episode, name) for name in episode.__struct_fields__}
            connection.execute(insert(_episodes).values(**facts).on_conflict_do_nothing())
            known = connection.execute(sa.select(_episodes).where(_episodes.c.id == episode.id)).mappings().one()
            for name, value in facts.items():
                if known[name] != value:
                    raise InvalidData(
                        f"segment {segment.id}: its episode is known with {name} {known[name]!r}, not {value!r}."
                    )
            control = summarise_control(segment.actor)
            connection.execute(
                sa.insert(_segments).values(
                    id=segment.id,
                    episode=episode.id,
                    index=segment.index,
                    first_tick=segment.first_tick,
                    steps=segment.steps,
                    human_steps=control.human_steps,
                    entry_actor=control.entry,
                    exit_actor=control.exit,
                    takeovers=control.takeovers,
                    path=stored.path,
                    bytes=stored.bytes,
                    sha256=stored.sha256,
                    closed_ns=segment.closed_ns,
                    received_ns=received_ns,
                    committed_ns=committed_ns,
                )
            )
            # Segments may come out of order, so the seams between them are counted afresh.
            seams = sa.select(_segments.c.entry_actor, _segments.c.exit_actor, _segments.c.takeovers)
            seams = seams.where(_segments.c.episode == episode.id).order_by("first_tick", "row")
            interventions = 0
            if episode.source != "demonstration":
                interventions = count_interventions((row[0], row[1], row[2]) for row in connection.execute(seams))
            connection.execute(
                sa.update(_episodes)
                .where(_episodes.c.id == episode.id)
                .values(
                    steps=_episodes.c.steps + segment.steps,
                    human_steps=_episodes.c.human_steps + control.human_steps,
                    interventions=interventions,
                    outcome=segment.outcome if segment.last else known["outcome"],
                )
            )
        return True

    def _require_spec(self, connection: sa.Connection, spec_hash: str) -> None:
        if connection.scalar(sa.select(tables.specs.c.hash).where(tables.specs.c.hash == spec_hash)) is None:
            raise InvalidData(f"robot spec {spec_hash} is unknown: the robot must say hello with it first.")

    def segment(self, segment_id: str) -> SegmentRow | None:
        rows = self._select(_SEGMENT_ROWS.where(_segments.c.id == segment_id))
        return SegmentRow(**rows[0]) if rows else None

    def segments_after(self, row: int, limit: int = 1000) -> tuple[SegmentRow, ...]:
        """Up to `limit` segments committed after ledger row `row` (0: from the first), in commit order."""
        query = _SEGMENT_ROWS.where(_segments.c.row > row).order_by(_segments.c.row).limit(limit)
        return tuple(SegmentRow(**found) for found in self._select(query))

    def segments_of(self, episode: str) -> tuple[SegmentRow, ...]:
        """The committed segments of an episode by index."""
        query = _SEGMENT_ROWS.where(_segments.c.episode == episode).order_by(_segments.c.index)
        return tuple(SegmentRow(**row) for row in self._select(query))

    def episode(self, episode_id: str) -> EpisodeRow | None:
        rows = self._select(sa.select(_episodes).where(_episodes.c.id == episode_id))
        return EpisodeRow(**rows[0]) if rows else None

    def episodes(self, robot: str | None = None, limit: int = 100) -> tuple[EpisodeRow, ...]:
        """The newest `limit` episodes, of one robot or of all, newest first."""
        query = sa.select(_episodes).order_by(sa.literal_column("rowid").desc()).limit(limit)
        if robot is not None:
            query = query.where(_episodes.c.robot == robot)
        return tuple(EpisodeRow(**row) for row in self._select(query))

    def totals(self) -> Totals:
        """What is stored of all robots."""
        with self._reading() as connection:
            return read_totals(connection).get(None, Totals())

    def robot_totals(self) -> dict[str, Totals]:
        """What is stored, by robot."""
        with self._reading() as connection:
            return {robot: totals for robot, totals in read_totals(connection).items() if robot is not None}

    # --- versions and measurements --------------------------------------------------------------------------------

    def commit_version(self, version: PolicyVersion, path: str) -> None:
        """Enter a version whose weights are on disk as `path`. Raises `InvalidData` if its number is taken."""
        facts = {name: getattr(version, name) for name in version.__struct_fields__}
        with self._writing() as connection:
            row = insert(tables.versions).values(path=path, **facts).on_conflict_do_nothing()
            if connection.execute(row).rowcount != 1:
                raise InvalidData(f"policy version {version.number} is in the ledger already.")

    def version(self, number: int) -> VersionRow | None:
        rows = self._select(sa.select(tables.versions).where(tables.versions.c.number == number))
        return _version_row(rows[0]) if rows else None

    def versions(self) -> tuple[VersionRow, ...]:
        """All versions, oldest first."""
        return tuple(_version_row(row) for row in self._select(sa.select(tables.versions).order_by("number")))

    def newest_version(self) -> VersionRow | None:
        query = sa.select(tables.versions).order_by(tables.versions.c.number.desc()).limit(1)
        rows = self._select(query)
        return _version_row(rows[0]) if rows else None

    def add_evaluation(self, evaluation: Evaluation, wall_ns: int) -> bool:
        """Enter a measurement; False if it was there. `wall_ns`: nanoseconds since 1970, now."""
        facts = {name: getattr(evaluation, name) for name in evaluation.__struct_fields__}
        facts["success"] = msgspec.json.encode(evaluation.success, order="sorted").decode()
        with self._writing() as connection:
            row = insert(tables.evaluations).values(wall_ns=wall_ns, **facts).on_conflict_do_nothing()
            return connection.execute(row).rowcount == 1

    def evaluations(self) -> tuple[EvaluationRow, ...]:
        """All measurements in the order they came."""
        columns = [column for column in tables.evaluations.c if column.name != "id"]
        rows = self._select(sa.select(*columns).order_by(tables.evaluations.c.id))
        return tuple(EvaluationRow(**{**row, "success": msgspec.json.decode(row["success"])}) for row in rows)

    def note_applied(self, robot: str, version: int, announced_ns: int, applied_ns: int) -> bool:
        """Note when `robot` first acted on `version`; False if that was noted before."""
        values = {"robot": robot, "version": version, "announced_ns": announced_ns, "applied_ns": applied_ns}
        with self._writing() as connection:
            row = insert(tables.applied).values(**values).on_conflict_do_nothing()
            return connection.execute(row).rowcount == 1

    def applied(self) -> tuple[AppliedRow, ...]:
        """All first uses of versions, by version and robot."""
        query = sa.select(tables.applied).order_by("version", "robot")
        return tuple(AppliedRow(**row) for row in self._select(query))

    def add_event(self, time_ns: int, robot: str, kind: str, detail: str = "") -> None:
        """Note something that happened; `time_ns` in the gateway's clock."""
        with self._writing() as connection:
            row = sa.insert(tables.events).values(time_ns=time_ns, robot=robot, kind=kind, detail=detail)
            connection.execute(row)

    def events(self, after_id: int = 0, limit: int = 1000) -> tuple[EventRow, ...]:
        """Up to `limit` events after event `after_id`, oldest first."""
        query = sa.select(tables.events).where(tables.events.c.id > after_id).order_by("id").limit(limit)
        return tuple(EventRow(**row) for row in self._select(query))

    def _select(self, query: sa.Select[Any]) -> list[dict[str, Any]]:
        with self._reading() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]


_HIDDEN = {"entry_actor", "exit_actor", "takeovers"}
_SEGMENT_ROWS = sa.select(
    *(column for column in _segments.c if column.name not in _HIDDEN),
    _episodes.c.robot,
    _episodes.c.spec_hash,
    _episodes.c.task,
    _episodes.c.source,
).join(_episodes, _segments.c.episode == _episodes.c.id)


def _version_row(row: dict[str, Any]) -> VersionRow:
    path = row.pop("path")
    return VersionRow(version=PolicyVersion(**row), path=path)
