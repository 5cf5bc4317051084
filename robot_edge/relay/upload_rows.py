"""What lies in a relay's spool: a segment, its state, and what there is to know of it."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from robot_edge.uplink.spool_index import is_kept
from wire.messages.gateway import Segment


class UploadState(IntEnum):
    """Of a segment on the relay's disk."""

    waiting = 0
    """the gateway does not have it"""
    held = 1
    """the gateway has it, but for the pictures that are held back"""
    asked = 2
    """and wants them"""
    refused = 3
    """the gateway does not believe it; offered once more by the next start"""


SENT = (UploadState.waiting, UploadState.asked)
"""those that are to be sent"""


class PutResult(NamedTuple):
    """What became of segments that were to be put in."""

    stored: tuple[str, ...]
    """ids"""
    invalid: dict[str, str]
    """by id: why it is no segment"""


class UploadFacts(NamedTuple):
    """What the index has to know."""

    steps: int
    kept: bool
    last: bool


class NewUpload(NamedTuple):
    """A segment that is to be put in."""

    segment: Segment
    cameras: tuple[str, ...]
    """whose pictures are held back"""
    data: bytes
    sent_bytes: int

    @property
    def about(self) -> UploadFacts:
        return UploadFacts(self.segment.steps, is_kept(self.segment), self.segment.last)


class UploadRow(NamedTuple):
    """A segment on the disk, all of its columns but the data."""

    row: int
    episode: str
    number: int
    steps: int
    kept: int
    last: int
    state: int
    cameras: str
    """whose pictures are held back, one a line"""
    size: int
    """bytes of it with all its pictures"""
    sent_size: int
    """and without those that are held back"""

    @property
    def about(self) -> UploadFacts:
        return UploadFacts(self.steps, bool(self.kept), bool(self.last))

    @property
    def bytes_to_send(self) -> int:
        return self.size if self.state == UploadState.asked else self.sent_size
