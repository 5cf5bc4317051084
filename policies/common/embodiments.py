"""Which robots a shared network knows: where each one's numbers go, and which row of its tables is whose.

A state or action dimension has a column by its name, unit and meaning: robots that share the name share the column, and
with it what the network learns of it. A row holds what is a robot's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from wire.errors import ConfigError, SpecMismatchError, WeightsError
from wire.types import Dimension, RobotSpec

_Key: TypeAlias = tuple[str, str, str]


class EmbodimentRow(msgspec.Struct, frozen=True):
    """One robot in the tables."""

    spec: RobotSpec
    state: tuple[int, ...]
    """column of each of its state dimensions"""
    action: tuple[int, ...]
    """and of each of its action dimensions"""
    ready: bool = True
    """whether it has learned enough for its robots to act by it"""


class EmbodimentTable(msgspec.Struct, frozen=True):
    """All of them; a robot's row is its place in `rows`. Rows only ever join, and columns stay whose they are."""

    capacity: int
    state_width: int
    action_width: int
    rows: tuple[EmbodimentRow, ...] = ()

    def row(self, spec_hash: str) -> int | None:
        """Of the robot spec that has this hash."""
        return next((number for number, one in enumerate(self.rows) if one.spec.hash == spec_hash), None)

    def refusal(self, spec: RobotSpec) -> str:
        """Why this robot cannot join, with the way out; '' if it can, or is there already."""
        if self.row(spec.hash) is not None:
            return ""
        who = f"robot '{spec.embodiment}' finds no room in the shared network:"
        if len(self.rows) >= self.capacity:
            return f"{who} all {self.capacity} rows are taken. Start one with a larger `capacity`."
        for kind, width, option in (
            ("state", self.state_width, "state_dim"),
            ("action", self.action_width, "action_dim"),
        ):
            taken = self._columns(kind)
            new = sum(_key(one) not in taken for one in getattr(spec, kind))
            if new > (free := width - len(taken)):
                return (
                    f"{who} {new} of its {kind} dimensions are new, {free} columns are free. Start one with a larger "
                    f"`{option}`."
                )
        return ""

    def join(self, spec: RobotSpec, *, ready: bool = True) -> EmbodimentTable:
        """The table with this robot in it, where it is not there already. Raises `ConfigError` without room."""
        if refusal := self.refusal(spec):
            raise ConfigError(refusal)
        if self.row(spec.hash) is not None:
            return self
        placed = EmbodimentRow(spec, self._place("state", spec.state), self._place("action", spec.action), ready)
        return msgspec.structs.replace(self, rows=(*self.rows, placed))

    def with_ready(self, spec_hash: str) -> EmbodimentTable:
        """The table in which robots of this spec may act."""
        rows = (msgspec.structs.replace(one, ready=one.ready or one.spec.hash == spec_hash) for one in self.rows)
        return msgspec.structs.replace(self, rows=tuple(rows))

    def nearest(self, spec: RobotSpec) -> int | None:
        """The row that has the most dimensions in common with this robot, by name, unit and meaning, and of those with
        as many the one with the most names; None when there is none."""
        own, names = self._wanted(spec), self._names(spec)
        common = [(len(own & self._wanted(one.spec)), len(names & self._names(one.spec))) for one in self.rows]
        return max(range(len(common)), key=common.__getitem__) if common else None

    def begins_as(self, kind: str) -> dict[int, int]:
        """Which columns only the newest robot has, and by each that of the nearest robot's dimension of the same name,
        whatever its unit. `kind`: state or action."""
        *_, newest = self.rows
        before = msgspec.structs.replace(self, rows=self.rows[:-1])
        if (like := before.nearest(newest.spec)) is None:
            return {}
        near = self.rows[like]
        named = {one.name: at for one, at in zip(getattr(near.spec, kind), getattr(near, kind), strict=True)}
        own = zip(getattr(newest.spec, kind), getattr(newest, kind), strict=True)
        taken = before._columns(kind).values()
        return {at: named[one.name] for one, at in own if one.name in named and at not in taken}

    def require(self, what: str) -> None:
        """Raise `WeightsError` for a table that was not made by `join`: such as one out of a file."""
        own = msgspec.structs.replace(self, rows=())
        try:
            for one in self.rows:
                own = own.join(one.spec, ready=one.ready)
        except ConfigError as error:
            raise WeightsError(f"{what}: {error}") from error
        if own != self:
            raise WeightsError(f"{what}: its table of robots is not valid; the file was changed after it was saved.")

    def require_row(self, spec: RobotSpec, what: str) -> int:
        """The row that robots of `spec` act by. Raises `SpecMismatchError` while there is none."""
        row = self.row(spec.hash)
        if row is not None and self.rows[row].ready:
            return row
        known = ", ".join(f"'{one.spec.embodiment}'" for one in self.rows if one.ready) or "no robot"
        raise SpecMismatchError(
            f"no version for this robot yet: {what} can drive {known}, and has not learned from robot "
            f"'{spec.embodiment}' ({spec.hash}) so far. Demonstrate with it; the trainer then gives it a row."
        )

    def _place(self, kind: str, dimensions: Sequence[Dimension]) -> tuple[int, ...]:
        taken = self._columns(kind)
        for one in dimensions:
            taken.setdefault(_key(one), len(taken))
        return tuple(taken[_key(one)] for one in dimensions)

    def _columns(self, kind: str) -> dict[_Key, int]:
        """Those that are taken: the first ones, without a gap."""
        found: dict[_Key, int] = {}
        for row in self.rows:
            for one in getattr(row.spec, kind):
                found.setdefault(_key(one), len(found))
        return found

    def _names(self, spec: RobotSpec) -> set[tuple[str, str]]:
        return {(kind, one.name) for kind in ("state", "action") for one in getattr(spec, kind)}

    def _wanted(self, spec: RobotSpec) -> set[tuple[str, _Key]]:
        return {(kind, _key(one)) for kind in ("state", "action") for one in getattr(spec, kind)}


def _key(one: Dimension) -> _Key:
    return one.name, one.unit, one.meaning.value
