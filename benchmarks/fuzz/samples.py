"""A valid message of each type that the codec knows, as a peer of some name would send it: where mutations begin."""

from __future__ import annotations

from typing import Any

import cv2
import msgspec
import msgspec.inspect as mi
import numpy as np

from wire.messages import Message, fleet, gateway, joining, local, relaying, versions
from wire.messages.gateway import CameraFrames, EdgeStatus, Hello, Segment
from wire.messages.local import ThinkRequest
from wire.types import CameraSpec, CommandType, Dimension, Episode, EpisodeSource, Frame, Observation, RobotSpec

TASKS = ("reach", "push")
SPEC = RobotSpec(
    embodiment="point",
    state=tuple(Dimension(name, "m", -1.0, 1.0) for name in "xyz"),
    action=tuple(Dimension(f"d{name}", "cm/step", -1.0, 1.0, CommandType.delta) for name in "xyz"),
    cameras=(CameraSpec("front", 8, 8, 20.0),),
    control_hz=80.0,
)
IMAGE = np.zeros((8, 8, 3), np.uint8)
JPEG = cv2.imencode(".jpg", IMAGE)[1].tobytes()
_MODULES = tuple(module.__name__ for module in (fleet, gateway, joining, local, relaying, versions))


def samples(sender: str, role: str, about: str) -> list[Message]:
    """One of each; names of robots in them are `about`."""
    kinds = sorted(
        (kind for kind in Message.__subclasses__() if kind.__module__ in _MODULES), key=lambda kind: kind.__name__
    )
    by_hand: tuple[Message, ...] = (hello(sender, role), status(about), segment(about), question())
    whole = {type(message): message for message in by_hand}
    return [whole.get(kind) or _build(mi.type_info(kind), about) for kind in kinds]


def hello(name: str, role: str) -> Hello:
    return Hello(name, role, "elsewhere", 1, 7, SPEC if role in ("edge", "demonstrator") else None, TASKS)


def status(robot: str) -> EdgeStatus:
    made = _build(mi.type_info(EdgeStatus), robot)
    free = {"mode": "policy", "state": np.zeros(3, np.float32), "stop": type(made.stop)(), "fault": "", "reason": ""}
    return msgspec.structs.replace(made, **free)


def segment(robot: str, number: int = 0, steps: int = 4) -> Segment:
    """A whole episode."""
    episode = Episode(f"{robot}-e{number}", robot, SPEC.hash, TASKS[0], number, EpisodeSource.online, 1)
    times_ns = np.arange(steps, dtype=np.int64) + 10
    zeros = np.zeros((steps, 3), np.float32)
    return Segment(
        id=f"{episode.id}/0",
        episode=episode,
        index=0,
        first_tick=0,
        last=True,
        outcome="success",
        closed_ns=100,
        times_ns=times_ns,
        state=zeros,
        proposed=zeros,
        executed=zeros,
        actor=np.zeros(steps, np.uint8),
        chunk_tick=np.full(steps, -1, np.int32),
        delay_ticks=np.zeros(steps, np.int16),
        version=np.zeros(steps, np.int32),
        reward=np.zeros(steps, np.float32),
        terminated=np.arange(steps) == steps - 1,
        truncated=np.zeros(steps, bool),
        frame_times_ns={"front": np.full(steps, 5, np.int64)},
        frames={"front": CameraFrames(np.array([5], np.int64), (JPEG,))},
    )


def question() -> ThinkRequest:
    """With its picture as JPEG."""
    seen = Observation(10, np.zeros(3, np.float32), {"front": Frame(5, np.zeros((0, 0, 3), np.uint8))}, TASKS[0])
    return ThinkRequest(1, (1,), seen, {"front": JPEG})


def _build(kind: mi.Type, text: str) -> Any:
    """A value of this type; each text in it is `text`."""
    match kind:
        case mi.StructType(cls=cls):
            if cls is RobotSpec:
                return SPEC
            return cls(**{field.name: _build(field.type, text) for field in kind.fields})
        case mi.UnionType(types=types):
            return _build(next(one for one in types if not isinstance(one, mi.NoneType)), text)
        case mi.DictType(key_type=key, value_type=value):
            return {_build(key, text): _build(value, text)}
        case mi.VarTupleType(item_type=item):
            return (_build(item, text),)
        case mi.TupleType(item_types=items):
            return tuple(_build(item, text) for item in items)
        case mi.EnumType(cls=cls):
            return next(iter(cls))
        case mi.CustomType():
            return np.zeros(3, np.float32)
        case mi.StrType():
            return text
        case mi.BytesType():
            return JPEG
        case mi.BoolType():
            return False
        case mi.FloatType():
            return 0.5
        case mi.IntType():
            return 1
    raise TypeError(f"no sample of {kind}")
