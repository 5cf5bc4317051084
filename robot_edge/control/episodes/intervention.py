"""The two parts of what somebody does who drives a robot in place of its policy.

As in RaC (arXiv 2509.07953, section 4.1): a person first recovers, which brings the robot back to where the policy has
been before, then corrects, which shows it what to do from there.
"""

from __future__ import annotations

from enum import StrEnum

from wire.types import Actor, OperatorCommandKind


class InterventionPart(StrEnum):
    """What somebody who drives does now."""

    recovery = "recovery"
    correction = "correction"


class Intervention:
    """Who drives corrects, unless they say that they recover; after a correction they do so until the policy acts.

    What was recorded is never another part afterwards: it may be learned from already.
    """

    def __init__(self, recovery_first: bool) -> None:
        """`recovery_first`: a person recovers until they say that they correct."""
        self._first = recovery_first
        self.new_episode()

    def new_episode(self) -> None:
        self.had = False
        """whether somebody has driven in this episode"""
        self._recovers, self._corrected = self._first, False

    @property
    def part(self) -> InterventionPart:
        """Of a person's next step."""
        recovers = self._recovers and not self._corrected
        return InterventionPart.recovery if recovers else InterventionPart.correction

    def say(self, word: OperatorCommandKind) -> bool:
        """Whoever drives says `recover` or `correct`; False if that cannot be any more."""
        recovers = word == OperatorCommandKind.recover
        if recovers and self._corrected:
            return False
        self._recovers = recovers
        return True

    def step(self, actor: Actor, by_person: bool) -> bool:
        """Whether a step of `actor` is a recovery; once for each that is recorded. `by_person`: one has the robot."""
        if not by_person:
            # What was said does not hold for whoever takes it over next.
            self._recovers = self._first
        if actor is Actor.policy:
            self._corrected = False
        elif actor is not Actor.hold:
            self.had = True
            self._corrected |= actor is Actor.script or self.part is InterventionPart.correction
            return not self._corrected
        return False
