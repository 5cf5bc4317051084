"""Which versions' files may go."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def removable(parents: Mapping[int, int], needed: Collection[int], acting: Collection[int], keep: int) -> list[int]:
    """Versions whose files nobody needs, oldest first. `parents`: of all versions whose files are here, by number.

    What stays: the `keep` newest, what is `needed`, what is `acting` on a robot, and the parent of each of those, from
    which it may be rebuilt or to which one may go back.
    """
    numbers = sorted(parents)
    stays = {*numbers[-keep:], *needed, *acting}
    stays |= {parents[number] for number in stays if number in parents}
    return [number for number in numbers if number not in stays]
