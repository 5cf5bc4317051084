"""Which versions' files may be deleted."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def removable(
    versions: Collection[int],
    parents: Mapping[int, int],
    needed: Collection[int],
    promoted: Collection[int],
    keep: int,
) -> list[int]:
    """Of the versions whose files are there, those that nobody needs, oldest first.

    Kept are the newest `keep`, at least one; the `needed`: pinned, current, reference, canary, and what any robot acts
    by; the parent of each of these, whose file a delta starts from; and the newest of the `promoted` that is there.

    parents: by version; 0 or none: it has no parent
    """
    there = set(versions)
    kept = set(sorted(there)[-max(keep, 1) :]) | (there & set(needed))
    kept |= {max(there & set(promoted), default=0)}
    kept |= {parents.get(number, 0) for number in kept | set(needed)}
    return sorted(there - kept)
