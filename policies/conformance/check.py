"""What every policy must do: run it on your own before you give it to a robot.

    for check in check_policy(lambda: MyPolicy(spec, seed=0)):
        print(check.name, "ok" if check.passed else check.detail)

`make` returns a fresh policy with the same first weights and the same random seed every time; it is called some fifty
times. What it does not offer is not checked: a prefix it refuses, and `set_normalization` if it is `pretrained`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from policies.conformance import acting, learning, weights
from policies.conformance.data import Make, example_batch, example_observation
from policies.interface.policy import Batch
from wire.types import Observation

__all__ = ["CHECKS", "Make", "PolicyCheck", "check_policy", "example_batch", "example_observation"]


@dataclass(frozen=True)
class PolicyCheck:
    """One promise and whether the policy kept it."""

    name: str
    passed: bool
    detail: str = ""
    """what was seen instead, '' when it passed"""


def check_policy(make: Make) -> list[PolicyCheck]:
    """Run every check on policies from `make`. What a policy raises becomes the detail of the check that failed."""
    results = []
    for name, check in CHECKS.items():
        try:
            policy = make()
            batch = example_batch(policy.spec, policy.horizon, ticks_ahead=policy.ticks_ahead, history=policy.history)
            detail = next(filter(None, check(make, example_observation(policy.spec), batch)), "")
        except Exception as error:  # noqa: BLE001  a policy under test may raise anything; it is reported, not hidden
            detail = f"{type(error).__name__}: {error}"
        results.append(PolicyCheck(name, not detail, detail))
    return results


CHECKS: dict[str, Callable[[Make, Observation, Batch], Iterator[str]]] = {
    "a chunk has H actions of the spec's width": acting.shapes,
    "actions are finite and within the spec's limits": acting.limits,
    "a chunk carries its tick, times and version": acting.stamps,
    "the same seed gives the same actions": acting.determinism,
    "no global random stream is moved": acting.random_streams,
    "act reads no image": acting.separation,
    "act reads the newest state": acting.fresh_state,
    "think reads no state, or says so": acting.no_state_in_latent,
    "act goes by the latent it is given": acting.own_latent,
    "a latent can be sent to another process": acting.travels,
    "acting changes no weights": acting.unchanged,
    "the latent's age matters only to a policy trained for delays": acting.age,
    "a chunk begins with what is committed": acting.prefix,
    "the rest of a chunk goes by what is committed": acting.behind_prefix,
    "a prefix that does not fit is refused": acting.bad_prefix,
    "an observation that does not fit is refused": acting.refusals,
    "it says what it was trained for": acting.training,
    "a latent of another version is refused": weights.versions,
    "saving and loading changes nothing": weights.round_trip,
    "loaded weights take effect": weights.takes_effect,
    "garbage is refused and the old weights stay": weights.garbage,
    "weights of another robot or network are refused": weights.others,
    "what is frozen is not published": weights.published,
    "statistics travel with the weights": weights.statistics,
    "a gradient reaches every trainable tensor": learning.gradient,
    "the loss is finite in bfloat16": learning.bfloat16,
    "masked actions do not matter": learning.masked,
    "samples of a batch do not see each other": learning.apart,
    "a batch may come flat or grouped": learning.flat_or_grouped,
    "training data that does not fit is refused": learning.refusals,
}
"""by what is promised: yields what is seen instead, or ''; nobody looks further than the first fault"""
