"""How policy versions travel: what trainers, the gateway and whoever runs versions say of them."""

from __future__ import annotations

from typing import ClassVar

from wire.messages import LARGE_BYTES, Message
from wire.types import PolicyCapabilities, PolicyVersion
from wire.weights.action_difference import ActionDifference
from wire.weights.manifest import DeltaForm


class FetchWeights(Message, frozen=True, eq=False):
    """Ask for bytes [offset, offset + size) of a version, or of the delta that makes it of its parent."""

    number: int
    offset: int
    size: int
    delta: bool = False
    chunk: bytes = b""
    """sha256 of the chunk that has them, b'' when it is not known; for whoever passes chunks on"""
    chunk_bytes: int = 0
    """of that chunk, 0 when its hash is not known"""


class FetchDeltas(Message, frozen=True, eq=False):
    """Ask by which deltas this version can be made of a version that is here."""

    number: int
    held: dict[int, str]
    """at least 12 digits of the sha256, by number, of versions whose files are here"""


class VersionAvailable(Message, frozen=True, eq=False):
    """This policy version is to act; it can be fetched."""

    max_bytes: ClassVar[int] = LARGE_BYTES
    version: PolicyVersion
    announced_ns: int
    manifest: bytes = b""
    """an encoded `wire.weights.manifest.Manifest`"""
    signature: bytes = b""
    """of that, by the key in `HelloAck`"""
    delta: DeltaForm | None = None
    """how its parent becomes it; None: only the whole is there"""
    withdrawn: tuple[int, ...] = ()
    """to a robot: older versions that it is not to begin to act by; another older one it may finish and act by first"""


class ShadowRequest(Message, frozen=True, eq=False):
    """To a robot: this version is to be computed beside the one that acts, and never to act; None: none any more."""

    max_bytes: ClassVar[int] = LARGE_BYTES
    offer: VersionAvailable | None


class ShadowReport(Message, frozen=True, eq=False):
    """From a robot: what came of a shadow since the last report."""

    robot: str
    number: int
    """the version that is computed"""
    difference: ActionDifference = ActionDifference()
    """of its actions from those that acted"""
    faults: int = 0
    """chunks that it failed to make"""
    fault: str = ""
    """why, of the newest one; or why the robot does not compute it at all"""


class ThinkVersions(Message, frozen=True, eq=False):
    """To think servers: robots may act by these versions now; the offers of those that are new follow."""

    numbers: tuple[int, ...]
    """the one that most robots wait for first"""


class Deltas(Message, frozen=True, eq=False):
    """The answer to `FetchDeltas`."""

    number: int
    deltas: tuple[DeltaForm, ...]
    """to be applied one after the other; none where the whole is smaller, or needed"""


class WeightBytes(Message, frozen=True, eq=False):
    """Part of a version's weights, or of its delta: fetched from the gateway, or published to it."""

    max_bytes: ClassVar[int] = LARGE_BYTES
    number: int
    offset: int
    data: bytes
    delta: bool = False


class Publish(Message, frozen=True, eq=False):
    """The trainer offers a version; its bytes follow as `WeightBytes`, in order."""

    max_bytes: ClassVar[int] = LARGE_BYTES
    version: PolicyVersion
    trained: tuple[int, ...] = ()
    """numbers of the episodes that were first trained on since the version's parent"""
    base: int = 0
    """what follows is the delta (`wire.weights.delta`) from this version; 0: it is the weights file itself"""
    delta_bytes: int = 0
    """size of that delta"""


class Published(Message, frozen=True, eq=False):
    """The version is on disk, committed and announced."""

    number: int


class VersionActivated(Message, frozen=True, eq=False):
    """The robot's inference now runs this version."""

    robot: str
    number: int
    applied_ns: int
    trained: PolicyCapabilities = PolicyCapabilities()
