"""One chunk request, answered: what the inference process and everything in simulated time share."""

from __future__ import annotations

import msgspec

from policies.interface.policy import Policy
from wire.messages.local import ChunkReply, ChunkRequest
from wire.types import Latent, Observation


def infer_chunk(policy: Policy, latent: Latent, request: ChunkRequest) -> ChunkReply:
    """The chunk that `policy` makes for `request` from `latent`.

    The fast path acts on the state of the moment the chunk begins, so the latent's age is counted up to then, from when
    it was seen or, if that is later, from when the robot began to move: who demonstrated hardly ever stood still, so to
    a network a great age means that much has been done. Raises what `Policy.act` raises.
    """
    seen, period_ns = request.observation, policy.spec.period_ns
    later_ticks = request.first_tick - request.tick
    moment = Observation(seen.time_ns + later_ticks * period_ns, request.state, seen.images, seen.task)
    begun_ns = moment.time_ns - (request.moved_ticks + later_ticks) * period_ns
    if request.moved_ticks < 0 or begun_ns <= latent.observed_ns:
        chunk = policy.act(moment, latent, request.first_tick, request.prefix)
    else:
        begun = msgspec.structs.replace(latent, observed_ns=begun_ns)
        chunk = policy.act(moment, begun, request.first_tick, request.prefix)
        chunk = msgspec.structs.replace(chunk, latent_observed_ns=latent.observed_ns)
    return ChunkReply(
        chunk,
        tick=request.tick,
        latent=latent.data if request.residual else None,
        corrector=policy.corrector if request.residual else None,
    )
