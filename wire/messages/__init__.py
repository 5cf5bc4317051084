"""Everything two processes may say to each other, one frozen type each; `Message` is the union the codec accepts.

`gateway`: between robots, trainers and the gateway; `fleet`: calls about robots, jobs and leases; `local`: between the
processes of one robot computer.
"""

from __future__ import annotations

from wire.messages.fleet import (
    AcquireLease,
    CancelJob,
    ListFleet,
    Preempted,
    ReleaseLease,
    RenewLease,
    Response,
    SubmitJob,
)
from wire.messages.gateway import (
    Ack,
    EdgeEvent,
    EdgeStatus,
    Evaluate,
    Evaluation,
    FetchWeights,
    Heartbeat,
    Hello,
    HelloAck,
    Job,
    Nack,
    OperatorCommand,
    Preview,
    Publish,
    Published,
    ReintroduceRequest,
    Rejection,
    Segment,
    SegmentCommitted,
    Stop,
    TrainerStatus,
    VersionActivated,
    VersionAvailable,
    WeightBytes,
)
from wire.messages.local import (
    ChunkReply,
    ChunkRequest,
    EpisodeEnded,
    EpisodeStarted,
    FrameRecorded,
    LoadWeights,
    RequestPreviews,
    SharedFrameEnvelope,
    StepRecorded,
    ThinkReply,
    ThinkRequest,
)

Message = (
    Hello
    | Heartbeat
    | FetchWeights
    | Segment
    | EdgeStatus
    | Preview
    | VersionActivated
    | EdgeEvent
    | HelloAck
    | Rejection
    | ReintroduceRequest
    | Ack
    | Nack
    | Job
    | VersionAvailable
    | WeightBytes
    | OperatorCommand
    | Stop
    | SegmentCommitted
    | Publish
    | Published
    | TrainerStatus
    | Evaluate
    | Evaluation
    | ListFleet
    | SubmitJob
    | CancelJob
    | AcquireLease
    | RenewLease
    | ReleaseLease
    | Response
    | Preempted
    | ChunkRequest
    | ChunkReply
    | ThinkRequest
    | ThinkReply
    | SharedFrameEnvelope
    | LoadWeights
    | RequestPreviews
    | EpisodeStarted
    | StepRecorded
    | FrameRecorded
    | EpisodeEnded
)
