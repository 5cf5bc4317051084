"""Limits of motion, densely at each bound and against policies that ask for anything."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.interfaces.dynamics import ActionStateMapping
from hal.safety.limiter import SafetyLimiter, hold_action, limit_action
from hal.safety.limits import SafetyLimits, compile_limits
from hal.safety.rest import rest_action
from tests.hal.safety.guarded import (
    ACTIONS,
    HZ,
    LIMITS,
    MIDDLE,
    SPEC,
    STATE,
    MotionState,
    P,
    Plant,
    apply_limits,
    at_rest,
    brake_action,
    near,
    speed_of,
    with_one,
)
from wire.errors import ConfigError, InvalidDataError


class TestVelocity:
    @pytest.mark.parametrize("index", range(3))
    @pytest.mark.parametrize("sign", [-1, 1])
    def test_densely_at_the_bound(self, index: int, sign: int) -> None:
        name = ACTIONS[index]
        top = {"move": 30.0, "spin": 1.0, "joint": 4.0}[name]
        compiled = compile_limits(SPEC, SafetyLimits(velocity={name: top}))
        unit = 1.0 if name == "spin" else P
        bound = float(MIDDLE[index] * (name == "joint")) + sign * top * unit
        for value in near(bound):
            wanted = with_one(index, value)
            action = apply_limits(compiled, at_rest(MIDDLE), wanted)
            speed = speed_of(compiled, action, MIDDLE)[index]
            assert abs(speed) <= top
            asked = speed_of(compiled, wanted, MIDDLE)[index]
            if abs(asked) <= top:
                assert action[index] == wanted[index], "what is allowed is left alone to the last bit"
            else:
                assert top - abs(speed) < 1e-4 * top, "no slower than it must be"
            others = [i for i in range(3) if i != index]
            assert (action[others] == wanted[others]).all()

    def test_each_meaning_has_its_speed(self) -> None:
        compiled = compile_limits(SPEC, SafetyLimits())
        action = np.array([0.5, -0.25, 1.5], np.float32)
        assert speed_of(compiled, action, MIDDLE).tolist() == [40.0, -0.25, 40.0]

    def test_from_any_place_rounding_stays_on_the_safe_side(self) -> None:
        compiled = compile_limits(SPEC, SafetyLimits(velocity={"joint": 0.013}))
        for at in np.linspace(0.2, 3.0, 500, dtype=np.float32):
            for way in (-9.0, 9.0):
                action = apply_limits(compiled, at_rest(with_one(2, at)), with_one(2, way))
                assert abs(speed_of(compiled, action, with_one(2, at))[2]) <= 0.013

    def test_a_limit_finer_than_float32_is_a_stop_not_a_jump(self) -> None:
        compiled = compile_limits(SPEC, SafetyLimits(velocity={"joint": 1e-9}))
        for at in np.linspace(0.2, 3.0, 100, dtype=np.float32):
            assert apply_limits(compiled, at_rest(with_one(2, at)), with_one(2, 9.0))[2] == at


class TestAcceleration:
    @pytest.mark.parametrize("index", range(3))
    @pytest.mark.parametrize("start", [-0.5, 0.0, 0.5])
    @pytest.mark.parametrize("sign", [-1, 1])
    def test_densely_at_the_bound(self, index: int, start: float, sign: int) -> None:
        name = ACTIONS[index]
        compiled = compile_limits(SPEC, SafetyLimits(acceleration={name: 8.0}))
        speed = np.zeros(3)
        speed[index] = start
        scale = 1.0 if name == "spin" else P
        origin = 1.0 if name == "joint" else 0.0
        bound = origin + (start + sign * 8.0 * P) * scale
        for value in near(bound):
            wanted = with_one(index, value)
            action = apply_limits(compiled, MotionState(MIDDLE, speed), wanted)
            change = speed_of(compiled, action, MIDDLE)[index] - start
            assert abs(change) <= 8.0 * P + 1e-12
            if abs(speed_of(compiled, wanted, MIDDLE)[index] - start) <= 8.0 * P:
                assert action[index] == wanted[index]

    def test_it_wins_over_velocity(self) -> None:
        compiled = compile_limits(SPEC, SafetyLimits(velocity={"move": 10.0}, acceleration={"move": 80.0}))
        # pushed to 60 a second it may lose 1 a second in each period
        action = apply_limits(compiled, MotionState(MIDDLE, np.array([60.0, 0, 0])), with_one(0, 0.0))
        assert speed_of(compiled, action, MIDDLE)[0] == pytest.approx(59.0, abs=1e-4)

    @pytest.mark.parametrize("top", [0.5, 3.0, 40.0])
    def test_a_joint_stops_at_its_bound_without_braking_harder_than_it_may(self, top: float) -> None:
        limits = SafetyLimits(acceleration={"joint": top})
        plant = Plant(compile_limits(SPEC, limits), limits)
        for way in (9.0, -9.0):
            for _ in range(600):
                plant.do(with_one(2, way))
            if top > 1:
                assert plant.moving.executed[2] == pytest.approx(3.0 if way > 0 else 0.2, abs=1e-4), "and reaches it"


class TestWalls:
    @pytest.mark.parametrize("sign", [-1, 1])
    @pytest.mark.parametrize("gain", [0.01, -0.01])
    def test_densely_at_a_wall_of_a_delta(self, sign: int, gain: float) -> None:
        limits = SafetyLimits(workspace={"x": (-0.25, 0.25)}, moves=(ActionStateMapping("move", "x", gain),))
        compiled = compile_limits(SPEC, limits)
        for distance in (*np.linspace(-0.003, 0.012, 61), 0.0):
            state = np.array([sign * (0.25 - distance), 0, 1], np.float32)
            left = max(0.0, 0.25 - abs(float(state[0])))
            outward = np.sign(gain) * sign
            for size in (1.0, 0.3, 1e-6):
                out = apply_limits(compiled, at_rest(MIDDLE), with_one(0, outward * size), state)[0]
                assert abs(out * gain) <= left + 1e-12
                assert abs(out) == pytest.approx(min(size, left / 0.01), abs=1e-6)
                back = apply_limits(compiled, at_rest(MIDDLE), with_one(0, -outward * size), state)[0]
                assert back == np.float32(-outward * size), "back in is always allowed"

    def test_a_velocity_knows_how_far_it_gets_in_a_period(self) -> None:
        limits = SafetyLimits(workspace={"angle": (-0.5, 0.5)}, moves=(ActionStateMapping("spin", "angle"),))
        compiled = compile_limits(SPEC, limits)
        state = np.array([0, 0.49, 1], np.float32)
        assert apply_limits(compiled, at_rest(MIDDLE), with_one(1, 2.0), state)[1] == pytest.approx(0.01 * HZ, abs=1e-5)

    def test_an_absolute_target_stays_inside_and_never_jumps_there(self) -> None:
        compiled = compile_limits(SPEC, SafetyLimits(workspace={"joint": (0.5, 2.5)}))
        for target in near(2.5):
            assert apply_limits(compiled, at_rest(MIDDLE), with_one(2, target))[2] <= 2.5
        outside = with_one(2, 2.9)
        assert apply_limits(compiled, at_rest(outside), with_one(2, 3.0))[2] == np.float32(2.9), "no further out"
        assert apply_limits(compiled, at_rest(outside), outside)[2] == np.float32(2.9), "hold is hold"
        assert apply_limits(compiled, at_rest(outside), with_one(2, 2.7))[2] == np.float32(2.7), "back in"

    def test_where_nobody_knows_it_brakes(self) -> None:
        limits = SafetyLimits(
            acceleration={"move": 80.0}, workspace={"x": (-1, 1)}, moves=(ActionStateMapping("move", "x", 0.01),)
        )
        compiled = compile_limits(SPEC, limits)
        moving = MotionState(MIDDLE, np.array([10.0, 0, 0]))
        for state in (None, np.array([np.nan, 0, 0], np.float32)):
            action = apply_limits(compiled, moving, with_one(0, 1.0), state)
            assert speed_of(compiled, action, MIDDLE)[0] == pytest.approx(9.0, abs=1e-4)

    def test_at_the_wall_it_stops_whatever_acceleration_says(self) -> None:
        limits = SafetyLimits(
            acceleration={"move": 1.0}, workspace={"x": (-0.25, 0.25)}, moves=(ActionStateMapping("move", "x", 0.01),)
        )
        compiled = compile_limits(SPEC, limits)
        fast = MotionState(MIDDLE, np.array([60.0, 0, 0]))
        assert apply_limits(compiled, fast, with_one(0, 1.0), np.array([0.25, 0, 1], np.float32))[0] == 0


FULL = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)


class TestHostilePolicies:
    @given(st.lists(st.tuples(FULL, FULL, FULL), min_size=1, max_size=60))
    @settings(max_examples=60, deadline=None)
    def test_any_numbers(self, rows: list[tuple[float, float, float]]) -> None:
        plant = Plant(compile_limits(SPEC, LIMITS), LIMITS)
        for row in rows:
            plant.do(np.array(row, np.float32))

    @given(
        st.integers(1, 40),
        st.floats(0.05, 400.0),
        st.floats(0.05, 4000.0),
        st.integers(0, 2**32 - 1),
    )
    @settings(max_examples=40, deadline=None)
    def test_full_scale_back_and_forth_under_any_limits(self, every: int, top: float, force: float, seed: int) -> None:
        limits = SafetyLimits(
            velocity=dict.fromkeys(ACTIONS, top),
            acceleration=dict.fromkeys(ACTIONS, force),
            workspace=LIMITS.workspace,
            moves=LIMITS.moves,
        )
        plant = Plant(compile_limits(SPEC, limits), limits)
        signs = np.random.default_rng(seed).choice([-1.0, 1.0], (200, 3))
        for tick in range(150):
            plant.do((signs[tick // every] * np.float32(3e38)).astype(np.float32))

    @pytest.mark.parametrize("seed", range(4))
    def test_random_with_all_that_is_not_an_action(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        plant = Plant(compile_limits(SPEC, LIMITS), LIMITS)
        wrong = [
            np.full(3, np.nan, np.float32),
            np.array([0, np.inf, 0], np.float32),
            np.zeros(2, np.float32),
            np.zeros((1, 3), np.float32),
            np.array(["x"] * 3),
            np.zeros(3, complex),
            np.full(3, 1e-45, np.float32),
            np.full(3, -1e-45, np.float32),
            np.array([3, -3, 3], np.int64),
            np.full(3, 1e300),
        ]
        for _ in range(1_500):
            kind = rng.integers(4)
            if kind == 0:
                plant.do(wrong[rng.integers(len(wrong))])
            elif kind == 1:
                plant.do((rng.standard_normal(3) * 10.0 ** rng.uniform(-8, 8)).astype(np.float32))
            else:
                plant.do(rng.uniform(SPEC.action_low(), SPEC.action_high()).astype(np.float32))

    def test_always_into_the_same_corner_and_out_again(self) -> None:
        plant = Plant(compile_limits(SPEC, LIMITS), LIMITS)
        for signs in itertools.product((-1, 1), repeat=3):
            for _ in range(200):
                plant.do(np.array(signs, np.float32) * 9)
            ends = LIMITS.workspace
            corner = [ends["x"][signs[0] > 0], ends["angle"][signs[1] < 0], ends["joint"][signs[2] > 0]]
            # it gets there: a compiled that only stops everything would also keep every limit
            assert np.allclose(plant.state, corner, atol=2e-3)


class TestHold:
    @pytest.mark.parametrize("seed", range(5))
    def test_whatever_it_does_it_comes_to_hold_and_stays(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        plant = Plant(compile_limits(SPEC, LIMITS), LIMITS)
        for _ in range(50):
            plant.do((rng.standard_normal(3) * 5).astype(np.float32))
        speeds = []
        for _ in range(40):
            plant.do(brake_action(plant.compiled, plant.moving, plant.state))
            speeds.append(np.abs(plant.moving.speed))
        assert (np.diff(speeds, axis=0) <= 1e-9).all(), "it only gets slower"
        assert not plant.moving.speed.any()
        held = plant.moving.executed
        assert np.array_equal(held, hold_action(SPEC, held))

    def test_without_acceleration_limits_it_holds_at_once(self) -> None:
        last = np.array([0.7, -1.5, 2.0], np.float32)
        speed = np.array([56.0, -1.5, 30.0])
        assert brake_action(
            compile_limits(SPEC, SafetyLimits(velocity={"move": 1.0})), MotionState(last, speed)
        ).tolist() == [0.0, 0.0, 2.0]

    def test_with_one_it_takes_its_time(self) -> None:
        limits = SafetyLimits(acceleration={"move": 1600.0, "joint": 160.0})
        last, speed = np.array([0.7, -1.5, 2.0], np.float32), np.array([56.0, -1.5, 5.0])
        first = brake_action(compile_limits(SPEC, limits), MotionState(last, speed))
        assert np.allclose(first, [0.45, 0.0, 2.0 + 3.0 * P], atol=1e-6)

    def test_what_was_done_last_must_be_an_action(self) -> None:
        with pytest.raises(InvalidDataError, match="joint"):
            brake_action(compile_limits(SPEC, SafetyLimits()), MotionState(with_one(2, np.nan), np.zeros(3)))

    def test_rest_is_where_it_is_measured(self) -> None:
        assert rest_action(SPEC, np.array([5.0, 6.0, 1.5], np.float32)).tolist() == [0.0, 0.0, 1.5]
        assert rest_action(SPEC, np.array([5.0, 6.0, 7.5], np.float32)).tolist() == [0.0, 0.0, 3.0]
        with pytest.raises(InvalidDataError, match="joint"):
            rest_action(SPEC, np.array([0, 0, np.nan], np.float32))


class TestSafety:
    def test_it_remembers_the_speed_for_a_loop(self) -> None:
        safety = SafetyLimiter(SPEC, SafetyLimits(acceleration={"move": 800.0}))
        executed, seen = MIDDLE, []
        for _ in range(4):
            action = safety.limit(with_one(0, 1.0), executed, STATE)
            safety.note(action, executed)
            executed = action
            seen.append(float(action[0]))
        assert seen == pytest.approx([0.125, 0.25, 0.375, 0.5])
        assert not safety.still
        for wanted in (0.375, 0.25, 0.125, 0.0):
            action = safety.brake(executed, STATE)
            assert np.array_equal(safety.limit(action, executed, STATE), action), "braking is within the limits"
            safety.note(action, executed)
            executed = action
            assert action[0] == pytest.approx(wanted)
        assert safety.still
        safety.note(with_one(0, 1.0), executed)
        safety.reset()
        assert safety.still

    def test_without_limits_only_bounds_are_left(self) -> None:
        safety = SafetyLimiter(SPEC, SafetyLimits())
        rng = np.random.default_rng(0)
        for wanted in rng.uniform(-5, 5, (200, 3)).astype(np.float32):
            action = safety.limit(wanted, MIDDLE, STATE)
            assert np.array_equal(action, limit_action(SPEC, wanted))
            assert action is not wanted

    def test_the_spec_and_its_hash_know_nothing_of_it(self) -> None:
        before = SPEC.hash
        SafetyLimiter(SPEC, LIMITS)
        assert SPEC.hash == before

    def test_arguments_are_left_alone(self) -> None:
        compiled = compile_limits(SPEC, LIMITS)
        wanted, moving, state = with_one(0, 9.0), at_rest(MIDDLE.copy()), STATE.copy()
        apply_limits(compiled, moving, wanted, state)
        assert wanted[0] == 9
        assert np.array_equal(moving.executed, MIDDLE)
        assert not moving.speed.any()
        assert np.array_equal(state, STATE)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (SafetyLimits(velocity={"mov": 1.0}), "velocity names 'mov'. Did you mean 'move'"),
        (SafetyLimits(acceleration={"x": 1.0}), "acceleration names 'x'"),
        (SafetyLimits(velocity={"move": 0.0}), "velocity of 'move' is 0.0"),
        (SafetyLimits(velocity={"move": float("nan")}), "velocity of 'move' is nan"),
        (SafetyLimits(acceleration={"move": -1.0}), "acceleration of 'move' is -1.0"),
        (SafetyLimits(workspace={"y": (0, 1)}), "workspace names 'y'"),
        (SafetyLimits(workspace={"joint": (1, 1)}), "is empty"),
        (SafetyLimits(workspace={"x": (0, 1)}), "nothing says which action moves 'x'"),
        (SafetyLimits(workspace={"joint": (5, 6)}), "no value of 'joint'"),
        (SafetyLimits(moves=(ActionStateMapping("move", "y"),)), "moves names 'y'"),
        (SafetyLimits(moves=(ActionStateMapping("mov", "x"),)), "moves names 'mov'"),
        (SafetyLimits(moves=(ActionStateMapping("move", "x", 0.0),)), "give a gain"),
        (
            SafetyLimits(
                workspace={"x": (0, 1)}, moves=(ActionStateMapping("move", "x"), ActionStateMapping("spin", "x"))
            ),
            "moved by move, spin",
        ),
    ],
)
def test_limits_that_cannot_be_kept_are_refused(limits: SafetyLimits, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        compile_limits(SPEC, limits)
    assert words in str(error.value)
    assert "'bench'" in str(error.value)
