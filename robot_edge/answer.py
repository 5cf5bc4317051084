"""One chunk request, answered: what the inference process and everything in simulated time share."""

from __future__ import annotations

from policies.base import Policy
from wire.messages import ChunkReply, ChunkRequest
from wire.types import Latent, Observation


def answer(policy: Policy, latent: Latent, request: ChunkRequest) -> ChunkReply:
    """The chunk that `policy` makes for `request` from `latent`.

    The fast path acts on the state of the moment the chunk begins, so the latent's age is counted up to then. Raises
    what `Policy.act` raises.
    """
    seen = request.observation
    later_ns = (request.first_tick - request.tick) * policy.spec.period_ns
    moment = Observation(seen.time_ns + later_ns, request.state, seen.images, seen.task)
    return ChunkReply(
        policy.act(moment, latent, request.first_tick, request.prefix),
        tick=request.tick,
        latent=latent.data if request.residual else None,
        corrector=policy.corrector if request.residual else None,
    )
