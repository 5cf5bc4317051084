import msgspec
import numpy as np
import pytest

from cloud_learner.buffer.check import check_frames, check_names, check_steps, jpeg_size, segment_bytes
from tests.cloud_learner.buffer.synthetic import fake_episode, fake_jpeg, fake_spec
from wire.errors import InvalidDataError
from wire.messages.gateway import ACTORS, CameraFrames
from wire.messages.recording import FlowTrace

SPEC = fake_spec(2)
FIRST, SECOND, LAST = fake_episode(SPEC, "e", steps=200)
replace = msgspec.structs.replace


def _check(segment, known=None, peer="r1"):
    check_names(segment, peer)
    check_steps(segment, SPEC)
    check_frames(segment, SPEC, known)


def _known(*segments):
    found = {}
    for segment in segments:
        for camera, frames in segment.frames.items():
            found[camera] = found.get(camera, frozenset()) | set(frames.times_ns.tolist())
    return found


def _changed(array, at, value):
    array = array.copy()
    array[at] = value
    return array


def test_a_good_episode_passes():
    _check(FIRST, {})
    _check(SECOND, _known(FIRST))
    _check(LAST, _known(FIRST, SECOND))
    _check(LAST, None)


def test_people_may_recover():
    _check(replace(FIRST, recovery=FIRST.actor == ACTORS.index("human")), {})
    assert {ACTORS.index(name) for name in ("human", "policy", "hold")} <= set(FIRST.actor.tolist())


def test_a_step_may_have_seen_what_the_one_before_saw():
    """A driver's state may come slower than the ticks, or be late once."""
    spec = fake_spec(0)
    (segment,) = fake_episode(spec, "e", steps=40)
    times = segment.times_ns.copy()
    times[5:7] = times[4]
    check_steps(replace(segment, times_ns=times), spec)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"id": "e/7"}, "is not"),
        ({"index": -1, "id": "e/-1"}, "index"),
        ({"first_tick": -1}, "first_tick"),
        ({"outcome": "success"}, "outcome"),
        ({"last": True}, "outcome"),
        ({"closed_ns": 2**64}, "closed_ns"),
        ({"state": _changed(FIRST.state, (3, 1), np.nan)}, "state is not finite at tick 3"),
        ({"executed": _changed(FIRST.executed, (0, 0), np.inf)}, "executed"),
        ({"proposed": FIRST.proposed[:, :3]}, "proposed"),
        ({"state": FIRST.state.astype(np.float64)}, "state is <f8"),
        ({"reward": FIRST.reward[:-1]}, "reward"),
        ({"times_ns": _changed(FIRST.times_ns, 5, FIRST.times_ns[4] - 1)}, "runs backwards at tick 5"),
        ({"actor": _changed(FIRST.actor, 0, 4)}, "actor 4"),
        ({"version": _changed(FIRST.version, 0, -1)}, "version"),
        ({"recovery": np.zeros(FIRST.steps, np.uint8)}, "recovery is"),
        ({"recovery": np.zeros(3, bool)}, "recovery"),
        ({"recovery": FIRST.actor == ACTORS.index("policy")}, "recovery at tick .* neither a human nor a script"),
        ({"recovery": FIRST.actor == ACTORS.index("hold")}, "recovery at tick .* neither a human nor a script"),
        ({"frame_times_ns": {}}, "cameras"),
        ({"frames": {**FIRST.frames, "other": FIRST.frames["camera0"]}}, "other"),
        ({"frames": {"camera0": FIRST.frames["camera0"]}}, "never came"),
    ],
)
def test_what_is_wrong_is_named(change, says):
    with pytest.raises(InvalidDataError, match=says):
        _check(replace(FIRST, **change), {})


def test_frames_must_be_images_of_the_spec_that_came_before_the_step():
    seen, frames = FIRST.frame_times_ns["camera0"], FIRST.frames["camera0"]

    def with_frames(encoded=frames.encoded, times=frames.times_ns):
        return replace(FIRST, frames={**FIRST.frames, "camera0": CameraFrames(times, tuple(encoded))})

    def with_seen(times):
        return replace(FIRST, frame_times_ns={**FIRST.frame_times_ns, "camera0": times})

    rng = np.random.default_rng(0)
    for bad in (b"", b"no image", fake_jpeg(32, 64, rng), frames.encoded[0][:-2]):
        with pytest.raises(InvalidDataError, match="frame 0"):
            _check(with_frames((bad, *frames.encoded[1:])), {})
    with pytest.raises(InvalidDataError, match="frame times"):
        _check(with_frames(frames.encoded[:-1]), {})
    with pytest.raises(InvalidDataError, match="do not grow"):
        _check(with_frames(times=frames.times_ns[::-1].copy()), {})
    with pytest.raises(InvalidDataError, match="older frame"):
        _check(with_seen(seen[::-1].copy()), None)
    with pytest.raises(InvalidDataError, match="taken after it"):
        _check(with_seen(_changed(seen, slice(40, None), FIRST.times_ns[-1] + 1)), None)
    with pytest.raises(InvalidDataError, match="never came"):
        _check(with_seen(seen + 1 - 1000), {})


def test_a_frame_of_an_earlier_segment_may_be_seen():
    late = replace(
        SECOND,
        frame_times_ns={
            camera: np.full(80, FIRST.frames[camera].times_ns[-1], np.int64) for camera in SECOND.frame_times_ns
        },
    )
    _check(late, _known(FIRST))
    with pytest.raises(InvalidDataError, match="never came"):
        _check(late, {})
    # an earlier segment has not come: nobody can tell
    _check(late, None)


def test_who_sent_it_must_be_whose_it_is():
    with pytest.raises(InvalidDataError, match="sent by 'r2'"):
        _check(FIRST, {}, peer="r2")
    for field, value in (("source", "dream"), ("task", ""), ("seed", -1), ("robot", "../r1")):
        bad = replace(FIRST, episode=replace(FIRST.episode, **{field: value}))
        with pytest.raises(InvalidDataError):
            _check(bad, {}, peer=bad.episode.robot)


def test_the_end_of_an_episode_may_bring_no_steps():
    empty = {n: getattr(LAST, n)[:0] for n in LAST.__struct_fields__ if isinstance(getattr(LAST, n), np.ndarray)}
    seen = {camera: times[:0] for camera, times in LAST.frame_times_ns.items()}
    nothing = replace(LAST, **empty, frame_times_ns=seen, frames={}, terminal=None, chunks=())
    _check(nothing, {})
    with pytest.raises(InvalidDataError, match="no steps"):
        _check(replace(nothing, last=False, outcome=""), {})
    with pytest.raises(InvalidDataError, match="no last action is here"):
        _check(replace(nothing, terminal=LAST.terminal), {})


def test_the_end_of_an_episode_does_not_contradict_itself():
    whole = _known(FIRST, SECOND)
    cut_off = replace(LAST, terminated=LAST.truncated, truncated=LAST.terminated, outcome="aborted")
    _check(cut_off, whole)
    with pytest.raises(InvalidDataError, match="tick 199 is both terminated and truncated"):
        _check(replace(LAST, truncated=LAST.terminated), whole)
    for name in ("terminated", "truncated"):
        with pytest.raises(InvalidDataError, match=f"{name} at tick 190, but the episode goes on"):
            _check(replace(LAST, **{name: _changed(LAST.truncated, 30, True)}), whole)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"state": LAST.terminal.state[:3]}, "terminal.state is <f4.3., expected <f4.4."),
        ({"state": LAST.terminal.state.astype(np.float64)}, "terminal.state is <f8"),
        ({"state": np.full(4, np.nan, np.float32)}, "terminal.state is not finite"),
        ({"time_ns": int(LAST.times_ns[-1])}, "terminal.time_ns .* is not after the last step"),
        ({"time_ns": 2**63}, "terminal.time_ns"),
        ({"frame_times_ns": {"camera0": LAST.terminal.frame_times_ns["camera0"]}}, "frames of cameras"),
        ({"frame_times_ns": {**LAST.terminal.frame_times_ns, "camera1": 5}}, "'camera1': .* frame of time 5, older"),
        ({"frame_times_ns": {**LAST.terminal.frame_times_ns, "camera1": 2**64}}, "taken after it"),
        (
            {"frame_times_ns": {**LAST.terminal.frame_times_ns, "camera1": LAST.terminal.time_ns}},
            "'camera1': .* frame of time .* that never came",
        ),
    ],
)
def test_a_terminal_observation_is_checked_like_a_step(change, says):
    with pytest.raises(InvalidDataError, match=says):
        _check(replace(LAST, terminal=replace(LAST.terminal, **change)), _known(FIRST, SECOND))


def test_only_the_last_segment_may_bring_a_terminal_observation():
    with pytest.raises(InvalidDataError, match="no last action is here"):
        _check(replace(FIRST, terminal=LAST.terminal), {})
    _check(replace(LAST, terminal=None), _known(FIRST, SECOND))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"first_tick": 3}, "chunk 0 of tick 3: no step"),
        ({"seed": 2**63}, "chunk 0: seed 9223372036854775808 does not fit"),
        ({"actions": FIRST.chunks[0].actions[:, :3]}, "chunk 0: actions is <f4.16, 3., expected <f4.16, 4."),
        ({"actions": FIRST.chunks[0].actions[0, 0]}, "chunk 0: actions"),
        ({"actions": np.full((16, 4), np.inf, np.float32)}, "chunk 0: actions is not finite"),
    ],
)
def test_a_chunk_must_be_one_of_the_robot_that_a_step_of_the_segment_executed(change, says):
    with pytest.raises(InvalidDataError, match=says):
        _check(replace(FIRST, chunks=(replace(FIRST.chunks[0], **change), *FIRST.chunks[1:])), {})


TRACE = FlowTrace(
    FIRST.chunks[0].first_tick, 1, np.ones((2, 64), np.float32), np.zeros(SPEC.state_dim, np.float32), 1.0
)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"points": np.ones((2, 63), np.float32)}, "trace 0: points is <f4.2, 63., expected <f4.2, 64."),
        ({"points": np.full((2, 64), np.nan, np.float32)}, "trace 0: points is not finite"),
        ({"state": np.zeros(1, np.float32)}, "trace 0: state"),
        ({"step": -1}, "trace 0: step -1"),
        ({"age_ticks": float("inf")}, "trace 0: step 1 of an age of inf"),
        ({"first_tick": 3}, "trace 0 of tick 3: no chunk of the segment is of it"),
    ],
)
def test_how_a_chunk_came_about_must_fit_it(change, says):
    def with_trace(trace):
        return replace(FIRST, traces=(trace,))

    _check(with_trace(TRACE), {})
    assert segment_bytes(with_trace(TRACE)) == segment_bytes(FIRST) + TRACE.points.nbytes + TRACE.state.nbytes
    with pytest.raises(InvalidDataError, match=says):
        _check(with_trace(replace(TRACE, **change)), {})


def test_jpeg_size_never_fails_on_garbage():
    rng = np.random.default_rng(0)
    good = fake_jpeg(24, 40, rng)
    assert jpeg_size(good) == (24, 40, 3)
    for _ in range(300):
        bad = bytearray(good)
        for at in rng.integers(0, len(bad), 5):
            bad[at] = rng.integers(256)
        jpeg_size(bytes(bad))
        jpeg_size(good[: rng.integers(len(good))] + b"\xff\xd9")
