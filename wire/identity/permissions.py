"""Which role may send which message, and to which port: one table, which whoever listens there asks.

A role is that of the record of the peer's key, never what the peer says.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from wire.messages import Message
from wire.messages.fleet import AcquireLease, CancelJob, ChangeVersions, ListFleet, ReleaseLease, RenewLease, SubmitJob
from wire.messages.gateway import (
    EdgeEvent,
    EdgeStatus,
    Evaluate,
    Evaluation,
    FetchDeltas,
    FetchPictures,
    FetchWeights,
    Heartbeat,
    Hello,
    OperatorCommand,
    PicturesGone,
    Preview,
    Publish,
    SealedSegment,
    Segment,
    ShadowReport,
    StopShown,
    TrainerStatus,
    VersionActivated,
    WeightBytes,
)
from wire.messages.local import ThinkRequest
from wire.types import CALLERS, Role


class Port(StrEnum):
    """Where a peer connects to."""

    messages = "messages"
    """the gateway"""
    stops = "stops"
    """the gateway's way of stops"""
    think = "think"
    """a think server"""
    relay = "relay"
    """of a site"""


RECORDERS = (Role.edge, Role.demonstrator)
_LEARNERS = (Role.trainer, Role.evaluator, Role.thinker, Role.relay)
_RUNNERS = (Role.edge, Role.evaluator, Role.thinker)
"""of versions"""
_ALL = (*RECORDERS, *_LEARNERS, *CALLERS)

MAY_SEND: Mapping[Port, Mapping[type[Message], tuple[Role, ...]]] = {
    Port.messages: {
        Hello: _ALL,
        Heartbeat: _ALL,
        Segment: RECORDERS,
        SealedSegment: (Role.relay,),
        PicturesGone: (Role.relay,),
        FetchPictures: (Role.trainer,),
        EdgeStatus: RECORDERS,
        Preview: RECORDERS,
        EdgeEvent: RECORDERS,
        VersionActivated: RECORDERS,
        ShadowReport: (Role.edge,),
        FetchWeights: (*_RUNNERS, Role.relay),
        FetchDeltas: _RUNNERS,
        Publish: (Role.trainer,),
        WeightBytes: (Role.trainer,),
        TrainerStatus: (Role.trainer,),
        Evaluate: (Role.evaluator,),
        Evaluation: (Role.evaluator,),
        OperatorCommand: (Role.teleoperator,),
        ChangeVersions: (Role.console,),
        **dict.fromkeys((ListFleet, SubmitJob, CancelJob, AcquireLease, RenewLease, ReleaseLease), CALLERS),
    },
    Port.stops: {
        Heartbeat: (Role.edge, *CALLERS),
        StopShown: (Role.edge,),
        OperatorCommand: CALLERS,
    },
    Port.think: {ThinkRequest: (Role.edge,)},
    Port.relay: {FetchWeights: _RUNNERS, **dict.fromkeys((Hello, Heartbeat, SealedSegment), RECORDERS)},
}


def may_send(port: Port, role: str, message: Message) -> bool:
    """Whether a peer of this role may send `message` to `port`."""
    return role in MAY_SEND[port].get(type(message), ())
