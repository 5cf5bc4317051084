import logging

import cv2
import msgspec
import numpy as np
import pytest

from cloud_learner.buffer.columns import Column
from cloud_learner.buffer.fake import fake_episode, fake_spec
from cloud_learner.buffer.ledger import Ledger
from cloud_learner.buffer.replay import Replay
from cloud_learner.buffer.store import SegmentStore
from wire.errors import ConfigError, InvalidData
from wire.messages import ACTORS, CameraFrames

TASKS = {"drawer-open": "open the drawer", "door-open": "open the door", "window-open": "open the window"}
HORIZON = 16
POLICY, HUMAN, SCRIPT, HOLD = range(4)


class Buffer:
    """A ledger and a store to fill, and what is in them."""

    def __init__(self, root, spec):
        self.spec = spec
        self.ledger = Ledger.open(root / "ledger.sqlite")
        self.ledger.see_robot("r1", spec, "clock", 1)
        self.store = SegmentStore.open(root / "segments")
        self.segments = []

    def add(self, *segments):
        for segment in segments:
            assert self.ledger.commit_segment(segment, self.store.write(segment), 1, 1)
            self.segments.append(segment)

    def replay(self, tasks=TASKS, **options):
        return Replay(self.ledger, self.store, self.spec, tasks, HORIZON, **options)

    def steps(self):
        """{episode: {tick: facts}} in plain Python: the reference."""
        found = {}
        for segment in self.segments:
            demonstration = segment.episode.source == "demonstration"
            if segment.episode.source == "evaluation":
                continue
            for t in range(segment.steps):
                actor = ACTORS[segment.actor[t]]
                found.setdefault(segment.episode.id, {})[segment.first_tick + t] = {
                    "task": segment.episode.task,
                    "state": segment.state[t],
                    "executed": segment.executed[t],
                    "imitable": actor != "hold" if demonstration else actor in ("human", "script"),
                    "actor": segment.actor[t],
                    "version": segment.version[t],
                    "seen": {camera: int(times[t]) for camera, times in segment.frame_times_ns.items()},
                    "time": int(segment.times_ns[t]),
                }
        return found

    def images(self):
        found = {}
        for segment in self.segments:
            for camera, frames in segment.frames.items():
                for time, data in zip(frames.times_ns.tolist(), frames.encoded, strict=True):
                    bgr = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
                    found[segment.episode.id, camera, time] = cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB)
        return found


def _window(steps, tick):
    """The window of one step by brute force: actions, mask."""
    da = len(steps[tick]["executed"])
    actions, mask = np.zeros((HORIZON, da), np.float32), np.zeros(HORIZON, np.float32)
    for h in range(HORIZON):
        step = steps.get(tick + h)
        if step is None or not step["imitable"]:
            break
        actions[h], mask[h] = step["executed"], 1
    return actions, mask


def _check_batch(buffer, batch, grouped):
    """Every window of the batch is one that brute force finds at the step with the same state."""
    where = {
        step["state"].tobytes(): (episode, tick)
        for episode, steps in buffer.steps().items()
        for tick, step in steps.items()
    }
    steps, images = buffer.steps(), buffer.images()
    b = len(batch["state"])
    drawn = set()
    for i in range(b):
        for j in range(batch["state"].shape[1]) if grouped else [()]:
            at = (i, j) if grouped else (i,)
            episode, tick = where[batch["state"][at].tobytes()]
            step = steps[episode][tick]
            drawn.add((episode, tick))
            assert step["imitable"]
            actions, mask = _window(steps[episode], tick)
            np.testing.assert_array_equal(batch["mask"][at], mask)
            np.testing.assert_array_equal(batch["actions"][at], actions)
            assert batch["instructions"][i] == TASKS[step["task"]]
            assert list(TASKS)[batch["task"][i]] == step["task"]
            assert batch["actor"][at] == step["actor"]
            assert batch["version"][at] == step["version"]
            oldest = min(step["seen"].values(), default=step["time"])
            np.testing.assert_allclose(
                batch["frame_age"][at], (step["time"] - oldest) / buffer.spec.period_ns, rtol=1e-6
            )
            for camera, time in step["seen"].items():
                np.testing.assert_array_equal(batch["images"][camera][i], images[episode, camera, time])
    return drawn


def _fill(buffer, episodes=8, seed=0, shuffle=False):
    rng = np.random.default_rng(seed)
    segments = []
    for e in range(episodes):
        source = ("online", "online", "demonstration", "evaluation")[e % 4]
        task = list(TASKS)[int(rng.integers(3))]
        length, cut = int(rng.integers(1, 120)), int(rng.integers(5, 50))
        segments += fake_episode(
            buffer.spec, f"e{e}", task=task, source=source, steps=length, segment_steps=cut, seed=100 * seed + e
        )
    if shuffle:
        rng.shuffle(segments)
    buffer.add(*segments)


@pytest.mark.parametrize("cameras", [0, 1, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_windows_equal_brute_force(tmp_path, cameras, shuffle):
    buffer = Buffer(tmp_path, fake_spec(cameras, size=16))
    _fill(buffer, seed=cameras, shuffle=shuffle)
    replay = buffer.replay()
    while replay.refresh(limit=3):
        pass
    rng = np.random.default_rng(0)
    drawn = _check_batch(buffer, replay.sample(1500, rng), grouped=False)
    startable = {
        (episode, tick) for episode, steps in buffer.steps().items() for tick, step in steps.items() if step["imitable"]
    }
    # with so many draws nearly every start is seen, and never another one
    assert drawn <= startable
    assert len(drawn) > 0.9 * len(startable)
    assert replay.imitable_steps == len(startable) == len(replay.states())


@pytest.mark.parametrize("cameras", [1, 2])
def test_grouped_windows_equal_brute_force(tmp_path, cameras):
    buffer = Buffer(tmp_path, fake_spec(cameras, size=16))
    _fill(buffer, seed=5 + cameras, shuffle=True)
    replay = buffer.replay()
    replay.refresh()
    batch = replay.sample_grouped(300, 5, np.random.default_rng(1))
    assert batch["state"].shape == (300, 5, 4)
    assert batch["actions"].shape == (300, 5, HORIZON, 4)
    assert batch["mask"].shape == (300, 5, HORIZON)
    assert batch["images"]["camera0"].shape == (300, 16, 16, 3)
    drawn = _check_batch(buffer, batch, grouped=True)
    startable = sum(step["imitable"] for steps in buffer.steps().values() for step in steps.values())
    assert len(drawn) > 0.9 * startable


def test_data_that_comes_later_joins_what_is_there(tmp_path):
    buffer = Buffer(tmp_path, fake_spec(1, size=16))
    replay = buffer.replay()
    assert replay.refresh() == 0
    with pytest.raises(InvalidData, match="no step to imitate"):
        replay.sample(4, np.random.default_rng(0))
    first, second = fake_episode(buffer.spec, "e", steps=40, segment_steps=22, actor=[HUMAN] * 40)
    # the second segment's first steps saw a frame that only the first one brings
    buffer.add(second)
    assert replay.refresh() == 1
    assert replay.imitable_steps == 16
    _check_batch(buffer, replay.sample(50, np.random.default_rng(0)), grouped=False)
    buffer.add(first)
    assert replay.refresh() == 1
    assert replay.imitable_steps == 40
    assert replay.finished("online") == 1
    assert _check_batch(buffer, replay.sample(1000, np.random.default_rng(0)), False) == {("e", t) for t in range(40)}
    assert replay.newest_row == 2
    assert replay.stats().frames == 10


def test_each_task_gets_an_equal_share(tmp_path):
    buffer = Buffer(tmp_path, fake_spec(1, size=16))
    for e, (task, steps) in enumerate([("drawer-open", 100), ("door-open", 4)]):
        buffer.add(*fake_episode(buffer.spec, f"e{e}", task=task, steps=steps, actor=[HUMAN] * steps, seed=e))
    replay = buffer.replay()
    replay.refresh()
    rng = np.random.default_rng(0)
    for batch in (replay.sample(101, rng), replay.sample_grouped(101, 3, rng)):
        counts = np.bincount(batch["task"], minlength=3)
        assert sorted(counts) == [0, 50, 51]
        assert counts[2] == 0
    # over many odd batches nobody is favoured
    totals = sum(np.bincount(replay.sample(1, rng)["task"], minlength=3) for _ in range(600))
    assert 240 < totals[0] < 360


def test_grouped_draws_are_even_over_frames_and_over_their_steps(tmp_path):
    buffer = Buffer(tmp_path, fake_spec(1, size=16))
    # frame 0 has four steps, frame 1 has one
    buffer.add(*fake_episode(buffer.spec, "e", steps=5, actor=[HUMAN] * 5))
    replay = buffer.replay()
    replay.refresh()
    batch = replay.sample_grouped(400, 8, np.random.default_rng(0))
    tick = np.argmax((batch["state"][..., None, :] == buffer.segments[0].state).all(-1), -1)
    assert 150 < (tick[:, 0] == 4).sum() < 250
    assert (np.bincount(tick.ravel(), minlength=5)[:4] > 300).all()


def test_only_what_may_be_imitated_is_decoded(tmp_path):
    buffer = Buffer(tmp_path, fake_spec(1, size=16))
    actor = [POLICY] * 40 + [HUMAN] * 8 + [POLICY] * 32
    buffer.add(*fake_episode(buffer.spec, "e", steps=80, segment_steps=42, actor=actor))
    replay = buffer.replay()
    replay.refresh()
    stats = replay.stats()
    assert (stats.steps, stats.imitable_steps, stats.frames) == (80, 8, 2)
    assert stats.imitable_by_task == {"drawer-open": 8}
    # the finished episode holds no encoded frame any more
    assert replay._jpeg_bytes == 0


def test_held_steps_and_foreign_segments_stay_out(tmp_path, caplog):
    buffer = Buffer(tmp_path, fake_spec(1, size=16))
    other = fake_spec(1, state_dim=7, size=16)
    buffer.ledger.see_robot("r2", other, "clock", 1)
    buffer.add(
        *fake_episode(buffer.spec, "d", source="demonstration", steps=30, actor=[HOLD] * 10 + [SCRIPT] * 20),
        *fake_episode(buffer.spec, "p", steps=30, actor=[POLICY] * 30),
        *fake_episode(buffer.spec, "v", source="evaluation", steps=30, actor=[HUMAN] * 30),
        *fake_episode(buffer.spec, "u", task="unheard-of", steps=30, actor=[HUMAN] * 30),
        *fake_episode(other, "o", robot="r2", steps=30, actor=[HUMAN] * 30),
    )
    replay = buffer.replay()
    assert replay.refresh() == 5
    stats = replay.stats()
    assert (stats.imitable_steps, stats.other_segments, stats.segments) == (20, 3, 2)
    assert replay.finished("demonstration") == 1
    state = np.concatenate([s.state[10:] for s in buffer.segments if s.episode.id == "d"])
    np.testing.assert_allclose(stats.state_mean, state.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(stats.state_std, state.std(0), rtol=1e-4)
    assert stats.action_std.shape == (4,)


def test_a_damaged_segment_is_left_out_and_named(tmp_path, caplog):
    buffer = Buffer(tmp_path, fake_spec(1, size=16))
    buffer.add(*fake_episode(buffer.spec, "e", steps=60, segment_steps=20, actor=[HUMAN] * 60))
    path = buffer.store.root / buffer.ledger.segment("e/1").path
    path.write_bytes(path.read_bytes()[:-7])
    replay = buffer.replay()
    with caplog.at_level(logging.ERROR):
        assert replay.refresh() == 3
    assert "e/1" in caplog.text
    assert replay.stats().corrupt_segments == 1
    del buffer.segments[1]
    _check_batch(buffer, replay.sample(200, np.random.default_rng(0)), grouped=False)


def test_a_frame_that_cannot_be_decoded_takes_only_its_steps_out(tmp_path, caplog):
    buffer = Buffer(tmp_path, fake_spec(1, size=16))
    (segment,) = fake_episode(buffer.spec, "e", steps=40, actor=[HUMAN] * 40)
    frames = segment.frames["camera0"]
    encoded = (b"\xff\xd8\xff nothing", *frames.encoded[1:])
    broken = msgspec.structs.replace(segment, frames={"camera0": CameraFrames(frames.times_ns, encoded)})
    buffer.add(broken)
    replay = buffer.replay()
    replay.refresh()
    assert "cannot be decoded" in caplog.text
    assert replay.imitable_steps == 36
    ticks = np.argmax((replay.sample(500, np.random.default_rng(0))["state"][:, None] == segment.state).all(-1), 1)
    assert set(ticks) == set(range(4, 40))


def test_above_its_capacity_the_oldest_episodes_are_forgotten(tmp_path):
    buffer = Buffer(tmp_path, fake_spec(2, size=16))
    everything = []
    for e in range(20):
        source = "demonstration" if e == 3 else "online"
        everything.append(
            fake_episode(
                buffer.spec, f"e{e}", task=list(TASKS)[e % 2], source=source, steps=60, segment_steps=25, seed=e
            )
        )
    capacity = 200_000
    replay = buffer.replay(capacity_bytes=capacity)
    rng = np.random.default_rng(0)
    # segments of neighbouring episodes are interleaved, as those of several robots are
    for pair in range(0, 20, 2):
        for a, b in zip(everything[pair], everything[pair + 1], strict=True):
            buffer.add(b, a)
            replay.refresh()
            assert replay.bytes <= capacity
            if replay.imitable_steps:
                _check_batch(buffer, replay.sample(20, rng), grouped=False)
                _check_batch(buffer, replay.sample_grouped(10, 3, rng), grouped=True)
    assert replay.stats().evicted_episodes > 5
    assert replay.finished("online") == 19
    drawn = {episode for episode, _ in _check_batch(buffer, replay.sample(3000, rng), grouped=False)}
    assert {"e3", "e18", "e19"} <= drawn
    assert "e0" not in drawn


def test_demonstrations_go_last_but_go(tmp_path, caplog):
    buffer = Buffer(tmp_path, fake_spec(1, size=64))
    for e in range(6):
        buffer.add(*fake_episode(buffer.spec, f"d{e}", source="demonstration", steps=80, actor=[SCRIPT] * 80, seed=e))
    replay = buffer.replay(capacity_bytes=700_000)
    replay.refresh()
    assert replay.bytes <= 700_000
    assert "a demonstration is forgotten" in caplog.text
    assert replay.imitable_steps > 0


def test_a_replay_that_cannot_work_is_refused(tmp_path):
    buffer = Buffer(tmp_path, fake_spec(0))
    for options in ({"tasks": {}}, {"capacity_bytes": 0}):
        with pytest.raises(ConfigError):
            buffer.replay(**options)


def test_a_column_grows_and_forgets():
    rng = np.random.default_rng(0)
    column, reference = Column(np.float32, (3,)), np.zeros((0, 3), np.float32)
    for _ in range(200):
        rows = rng.random((int(rng.integers(0, 100)), 3)).astype(np.float32)
        assert column.append(rows) == len(reference)
        reference = np.concatenate([reference, rows])
        if rng.random() < 0.1:
            kept = np.flatnonzero(rng.random(len(reference)) < 0.5)
            column.keep(kept)
            reference = reference[kept]
        np.testing.assert_array_equal(column.rows, reference)
        assert column.nbytes == reference.nbytes
