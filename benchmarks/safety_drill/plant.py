"""The simulated robot of the drill, and its auditor: every command that reaches the motors is held against what is
known of the world at that moment.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from hal.interfaces.dynamics import ActionStateMapping
from hal.interfaces.robot import Feedback, RestPose
from hal.safety.limits import SafetyLimits
from wire.clock import ManualClock
from wire.errors import RobotError
from wire.types import CameraSpec, CommandType, Dimension, Frame, Mode, Observation, RobotSpec

HZ = 50.0
PERIOD_S = 1 / HZ
CAMERA_EVERY = 2
"""readings between two new pictures"""

SPEC = RobotSpec(
    "drill",
    (Dimension("joint", "deg", -180, 180), Dimension("x", "m", -2, 2), Dimension("y", "m", -3, 3)),
    (
        Dimension("joint", "deg", -170, 170),
        Dimension("move", "m/step", -0.05, 0.05, CommandType.delta),
        Dimension("wheel", "m/s", -1, 1, CommandType.velocity),
    ),
    (CameraSpec("front", 8, 8, HZ / CAMERA_EVERY),),
    HZ,
)
"""a target, a delta and a velocity"""

SPEED = np.array([90.0, 1.5, 0.8])
"""of each action dimension, per second (the velocity in its own unit)"""
ACCELERATION = np.array([900.0, 15.0, 4.0])
STOP = np.array([1800.0, 30.0, 8.0])
WORKSPACE = {"x": (-1.5, 1.5), "y": (-2.5, 2.5)}
LIMITS = SafetyLimits(
    velocity=dict(zip(("joint", "move", "wheel"), SPEED.tolist(), strict=True)),
    acceleration=dict(zip(("joint", "move", "wheel"), ACCELERATION.tolist(), strict=True)),
    stop_deceleration=dict(zip(("joint", "move", "wheel"), STOP.tolist(), strict=True)),
    workspace=WORKSPACE,
    moves=(ActionStateMapping("move", "x", 1.0), ActionStateMapping("wheel", "y", 1.0)),
)
OPEN = SafetyLimits(workspace=WORKSPACE, moves=LIMITS.moves)
"""nothing hides a jump"""
CALM = np.array([60.0, 1.0, 0.5])
"""the speeds at which policy and people move"""
LATEST_TICKS = 20
"""that an answer takes at most, and within which a plan goes on without the robot"""
BLEND_TICKS = 25
"""in which the policy comes in after a person"""
WILD_NS = 3_000_000_000
"""for so long a wild chunk may show: late by `LATEST_TICKS`, executed for a horizon, and the same again for the one
that was made meanwhile, with a stall and a restart of control in between: 138 ticks"""
_GRAIN = 2e-3
"""of a limit: what float32 and the order of two roundings may add"""
STOP_TICKS = int(np.ceil((SPEED / STOP / PERIOD_S).max())) + 1
"""commands from any speed to none"""
_TOP, _CHANGE, _STOP_CHANGE, _BRAKING, _STOP_BRAKING, _CALM, _HASTY = (
    [float(number) for number in limit]
    for limit in (
        SPEED * (1 + _GRAIN) + _GRAIN,
        ACCELERATION * PERIOD_S * (1 + _GRAIN) + _GRAIN,
        STOP * PERIOD_S * (1 + _GRAIN) + _GRAIN,
        ACCELERATION * PERIOD_S * (1 - _GRAIN),
        STOP * PERIOD_S * (1 - _GRAIN) - _GRAIN,
        CALM * 1.05 + 1e-3,
        CALM * (1 + LATEST_TICKS / BLEND_TICKS) * 1.05 + 1e-3,
    )
)
"""as plain numbers, of which three are held against each other faster than arrays; hasty: what a late plan is ahead of
the robot by when the policy comes in is made up for while it does"""
_GENTLE = (CALM[1:] / 10).tolist()
_FREE = 165, 1.4, 2.4
"""of the state: where limits contradict each other walls win over acceleration"""


@dataclass
class Truth:
    """What the drill knows and the software under test has to find out."""

    stops: set[str] = field(default_factory=set)
    newest_stop: str = ""
    started: bool = True
    holder: str = "policy"
    """policy, human or nobody"""
    late: bool = False
    """the command under way waited so long that it must not be executed"""
    commanded_ns: int = 0
    """when the person who holds it commanded last, by what has reached the robot"""
    released: bool = False
    """that command said that nothing is pressed any more"""
    gently: int = 0
    """so many commands that gain speed are still to be slow, for a person has just handed back"""
    speed_limits: dict[str, float] = field(default_factory=dict)
    """share of its velocity limits, by who said so"""
    wild_until: int = -1
    """time until which a chunk may be executed that was not made calmly"""


class Plant:
    """Keeps the `Robot` protocol. What goes wrong with it is set from outside, for a number of readings."""

    def __init__(self, clock: ManualClock, truth: Truth, limited: bool, moves_to_rest: bool) -> None:
        """`limited`: by `LIMITS`, else by `OPEN`; `moves_to_rest`: episodes begin in a pose it has to reach."""
        self.moves_to_rest = moves_to_rest
        self.blends = False
        """whether the policy comes in gently after a person, and makes up for it"""
        self.scenes = 0
        self.spec, self.truth, self.limited = SPEC, truth, limited
        self.real = self.returns_by_steps = limited
        """where no command may take it, it comes back within its limits and not at once"""
        self.sees_jumps = not limited
        """whether every chunk goes on where the robot is, and nothing hides it if one does not"""
        self.state = [0.0, 0.0, 0.0]
        self.violations: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.writes = 0
        self.fault, self.fault_reads = "", 0
        self.refuses = 0
        self._clock = clock
        self._target = 0.0
        self._allowed = SPEED.tolist()
        """how fast it may still be, by what it was slowed to and the braking that this takes"""
        self._speed = [0.0, 0.0, 0.0]
        self._pictures = 0
        self._frame = Frame(0, np.zeros((8, 8, 3), np.uint8))
        self._good_ns = self._camera_ns = -(10**12)
        """when it was read last with nothing wrong, and when it last gave a new picture"""
        self._last_read_good = False
        self._braking = 0
        """commands since it had to stop"""
        self._written_ns = self._heard_ns = self._stopped_ns = 0
        """when it took a command, refused one, and was not stopped, for the last time"""
        self._offset_ns = self._good_offset_ns = 0

    def connect(self) -> None: ...

    def close(self) -> None:
        """Stops, as a driver must, and as hard as its motors can: who could command it has braked it before."""
        if any(self._speed) and self._heard_ns <= self._written_ns:
            self._violate("closed in motion", str(self._speed))
        self._speed = [0.0, 0.0, 0.0]

    def reset(self, task: str, seed: int) -> RestPose | None:
        if not self.truth.started or self.truth.stops:
            self._violate("reset while stopped", "")
        if any(self._speed):
            self._violate("reset in motion", str(self._speed))
        self.scenes += 1
        self.truth.gently = 0
        rng = np.random.default_rng(seed)
        if self.moves_to_rest:
            return RestPose(np.array([rng.uniform(-60, 60), 0, 0], np.float32), 0.15, 0.02)
        self.state = rng.uniform([-60, -0.5, -0.5], [60, 0.5, 0.5]).tolist()
        if self.limited and rng.random() < 0.1:
            # Pushed by hand to where no command may take it: it has to come back within its limits.
            self.state[0] = math.copysign(rng.uniform(170, 178), self.state[0])
        self.state[0] = self._target = float(np.float32(self.state[0]))
        self._speed = [0.0, 0.0, 0.0]
        return None

    def read(self) -> Observation:
        now_ns = self._clock.now_ns()
        fault = self.fault if self.fault_reads > 0 else ""
        self.fault_reads -= 1
        self._pictures += 1
        if fault == "raise":
            self._last_read_good = False
            raise RobotError("the drill: no answer")
        if fault == "jump":
            self._offset_ns += int(2e9) if self._pictures % 2 else -int(2e9)
        # A camera that nobody looks at goes on: the next look finds a new picture, whatever the time is said to be.
        due = fault != "jump" and self._pictures % CAMERA_EVERY == 0
        if fault != "camera" and (due or now_ns - self._camera_ns > 5 * CAMERA_EVERY * PERIOD_S * 1e9):
            image = np.full((8, 8, 3), self._pictures % 251, np.uint8)
            self._frame = Frame(now_ns + self._offset_ns, image)
            self._camera_ns = now_ns
        state = np.array(self.state, np.float32)
        if fault == "nan":
            state[1] = np.nan
        time_ns = now_ns + self._offset_ns - (int(0.7e9) if fault == "old" else 0)
        # A clock that went and came back between two readings says nothing wrong.
        self._last_read_good = fault in ("", "camera") or (fault == "jump" and self._offset_ns == self._good_offset_ns)
        if self._last_read_good:
            self._good_ns, self._good_offset_ns = now_ns, self._offset_ns
        return Observation(time_ns, state, {"front": self._frame}, "drill")

    def write(self, action: np.ndarray) -> Feedback:
        if self.refuses > 0:
            self.refuses -= 1
            self._heard_ns = self._clock.now_ns()
            raise RobotError("the drill: the bus is busy")
        self.writes += 1
        target, move, wheel = action.tolist()
        speed = [(target - self._target) / PERIOD_S, move / PERIOD_S, wheel]
        self._audit(speed, target)
        self._target, self._speed, self._written_ns = target, speed, self._clock.now_ns()
        self.state = [target, self.state[1] + move, self.state[2] + wheel * PERIOD_S]
        return Feedback(action)

    def on_blocked(self) -> None:
        """Its driver blocked until now: nobody could command it."""
        self._heard_ns = self._clock.now_ns()

    def on_tick(self, mode: str) -> None:
        """Control says who moved it."""
        if mode == Mode.human and self.truth.holder == "policy" and any(self._speed):
            self._violate("a person drives who has handed back", f"{self._speed}")

    def look(self) -> None:
        """Some time has passed: what must have happened by now?"""
        now_ns, moves = self._clock.now_ns(), any(self._speed)
        if not self.truth.stops:
            self._stopped_ns = now_ns
        heard_ns = max(self._written_ns, self._heard_ns)
        if moves and now_ns - max(self._stopped_ns, self._heard_ns) > (STOP_TICKS + 2) * PERIOD_S * 1e9:
            self._violate("it moves on after a stop", f"{self._speed}")
        if moves and now_ns - heard_ns > 3.5 * PERIOD_S * 1e9:
            self._violate("it moves on without a command", f"for {(now_ns - self._written_ns) / 1e6:.0f} ms")

    # --- the auditor ------------------------------------------------------------------------------------------------

    def _audit(self, speed: list[float], target: float) -> None:
        truth, before, now_ns = self.truth, self._speed, self._clock.now_ns()
        stopping = bool(truth.stops) or not truth.started
        if not all(map(math.isfinite, speed)):
            self._violate("a number that is none", str(speed))
            return
        if self.limited:
            share = min(truth.speed_limits.values(), default=1.0)
            braked = zip(_TOP, self._allowed, _BRAKING, strict=True)
            self._allowed = [max(share * top, allowed - braking) for top, allowed, braking in braked]
            if any(abs(new) > allowed for new, allowed in zip(speed, self._allowed, strict=True)):
                self._violate("velocity", f"{before} -> {speed}, at {share:g} of its limits")
            most = _STOP_CHANGE if truth.stops else _CHANGE
            every = zip(speed, before, most, self.state, _FREE, strict=True)
            if any(abs(new - old) > change and abs(at) < free for new, old, change, at, free in every):
                self._violate("acceleration", f"{before} -> {speed}")
        if abs(target) > max(170.001, abs(self._target) + _GRAIN):
            self._violate("position", str(target))
        if abs(self.state[1]) > 1.501 or abs(self.state[2]) > 2.501:
            self._violate("workspace", str(self.state))
        gains = self._gains(speed, before)
        if stopping:
            self._braking += 1
            if gains:
                self._violate("motion while stopped", f"{before} -> {speed}")
            braked = zip(speed, before, _STOP_BRAKING, strict=True)
            if truth.stops and self.limited and any(abs(new) > max(abs(old) - hard, 1e-3) for new, old, hard in braked):
                self._violate("a stop that brakes softly", f"{before} -> {speed}")
            if self._braking > STOP_TICKS and truth.stops and any(speed):
                self._violate("stop distance", f"{speed} after {self._braking} commands")
            return
        self._braking = 0
        if not gains:
            return
        if not self._last_read_good or now_ns - self._good_ns > 0.55e9:
            self._violate("motion without a valid observation", f"{before} -> {speed}")
        if now_ns - self._camera_ns > 0.65e9:
            self._violate("motion without a fresh picture", f"{(now_ns - self._camera_ns) / 1e9:.3f} s")
        if truth.late:
            self._violate("a command that waited too long", f"{before} -> {speed}")
        silent = truth.holder == "human" and now_ns - truth.commanded_ns > 0.30e9
        silent |= truth.holder == "human" and truth.released
        # whoever may drive goes backwards, and all that must not reach the robot forwards
        if silent or truth.holder == "nobody" or (truth.holder == "human" and speed[1] > max(before[1], 0) + 1e-3):
            self._violate("motion for somebody who does not hold it", f"{truth.holder}: {before} -> {speed}")
        calm = self.sees_jumps and truth.wild_until < now_ns
        if calm and any(abs(new) > most for new, most in zip(speed, _HASTY if self.blends else _CALM, strict=True)):
            self._violate("a jump", f"{before} -> {speed}")
        if truth.gently and truth.holder == "policy":
            truth.gently -= 1
            if calm and any(
                abs(new) > abs(old) + gain for new, old, gain in zip(speed[1:], before[1:], _GENTLE, strict=True)
            ):
                self._violate("somebody else at once after a person", f"{before} -> {speed}")

    @staticmethod
    def _gains(speed: list[float], before: list[float]) -> bool:
        """Whether anything moves faster than before, or the other way."""
        return any(
            abs(new) > abs(old) * (1 + _GRAIN) + 1e-3 or (new * old < 0 and abs(new) > 1e-3)
            for new, old in zip(speed, before, strict=True)
        )

    def _violate(self, what: str, example: str) -> None:
        self.violations[what] += 1
        self.examples.setdefault(what, f"at {self._clock.now_ns() / 1e9:.3f} s: {example}")
