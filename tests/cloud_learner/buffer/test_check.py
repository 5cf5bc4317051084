import msgspec
import numpy as np
import pytest

from cloud_learner.buffer.check import check_frames, check_names, check_steps, jpeg_size
from tests.cloud_learner.buffer.synthetic import fake_episode, fake_jpeg, fake_spec
from wire.errors import InvalidDataError
from wire.messages.gateway import CameraFrames

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
        ({"times_ns": _changed(FIRST.times_ns, 5, FIRST.times_ns[4])}, "does not grow at tick 5"),
        ({"actor": _changed(FIRST.actor, 0, 4)}, "actor 4"),
        ({"version": _changed(FIRST.version, 0, -1)}, "version"),
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
    nothing = replace(LAST, **empty, frame_times_ns=seen, frames={})
    _check(nothing, {})
    with pytest.raises(InvalidDataError, match="no steps"):
        _check(replace(nothing, last=False, outcome=""), {})


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
