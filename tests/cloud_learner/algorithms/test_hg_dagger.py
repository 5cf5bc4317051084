"""HG-DAgger and what all algorithms share: what is repeated, shifted, and asked of the data."""

import numpy as np
import pytest

from cloud_learner.algorithms.augmentation import random_shift, shift_images
from cloud_learner.algorithms.hg_dagger import HGDagger, repeat_steps
from cloud_learner.buffer.control import HUMAN, POLICY, RECOVERY
from cloud_learner.buffer.sampling.target import Moment, StepRuns
from cloud_learner.training.config import RateSchedule, TrainingConfig
from fleet.config.recipes import fake
from fleet.config.settings import with_settings
from policies.conformance.check import example_batch
from tests.cloud_learner.training.test_learner import SPEC
from wire.errors import ConfigError


def test_draws_repeat_each_step_behind_its_image():
    grouped = example_batch(SPEC, 4, steps=2)
    out = repeat_steps(grouped, 3)
    assert out["state"].shape == (4, 6, 2)
    assert np.array_equal(out["actions"][:, 3:], grouped["actions"][:, 1:].repeat(3, 1))
    assert out["images"]["front"] is grouped["images"]["front"]
    flat = grouped | {name: grouped[name][:, 0] for name in ("state", "actions", "mask")}
    assert repeat_steps(flat, 3)["mask"].shape == (4, 3, 4)
    assert grouped["state"].shape == (4, 2, 2)


def test_draws_repeat_the_age_and_what_corrects_single_actions_too():
    grouped = example_batch(SPEC, 4, images=3, steps=2) | {
        "frame_age": np.arange(6, dtype=np.float32).reshape(3, 2),
        "later_index": np.arange(6).reshape(3, 2),
        "later_state": np.arange(12, dtype=np.float32).reshape(3, 2, 2),
    }
    out = repeat_steps(grouped, 2)
    assert out["frame_age"].tolist() == [[0, 0, 1, 1], [2, 2, 3, 3], [4, 4, 5, 5]]
    assert out["later_index"].tolist() == out["frame_age"].tolist()
    assert out["later_state"][:, :, 0].tolist() == (2 * out["frame_age"]).tolist()
    flat = {name: grouped[name][:, 0] for name in ("state", "actions", "mask", "frame_age", "later_state")}
    out = repeat_steps(flat, 2)
    assert out["frame_age"].tolist() == [[0, 0], [2, 2], [4, 4]]
    assert out["later_state"].shape == (3, 2, 2)
    of_an_image = grouped | {"frame_age": np.zeros(3, np.float32)}
    assert repeat_steps(of_an_image, 2)["frame_age"].shape == (3,)


def test_the_past_is_repeated_and_shifted_with_what_is_seen():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (5, 8, 8, 3), np.uint8)
    batch = example_batch(SPEC, 4, images=5, steps=2)
    batch |= {
        "images": {"front": images, "top": images},
        "past_images": {"front": np.stack([images, images], 1)},
        "past_state": rng.normal(size=(5, 2, 3, 2)).astype(np.float32),
    }
    out = repeat_steps(shift_images(batch, 2, rng), 3)
    assert out["past_state"].shape == (5, 6, 3, 2)
    assert np.array_equal(out["past_state"][:, 3:], batch["past_state"][:, 1:].repeat(3, 1))
    assert out["past_images"]["front"].shape == (5, 2, 8, 8, 3) and out["past_images"].keys() == {"front"}
    for n in range(2):
        assert np.array_equal(out["past_images"]["front"][:, n], out["images"]["front"])
    assert not np.array_equal(out["images"]["front"], images)
    assert batch["images"]["front"] is images
    flat = {name: batch[name][:, 0] for name in ("state", "actions", "mask", "past_state")} | {"images": {}}
    assert repeat_steps(flat, 2)["past_state"].shape == (5, 2, 3, 2)


def test_shift_moves_each_image_by_at_most_so_many_pixels():
    image = np.zeros((200, 9, 9, 3), np.uint8)
    image[:, 4, 4] = 255
    shifted = random_shift(image, 2, np.random.default_rng(0))
    y, x = np.nonzero(shifted[..., 0])[1:]
    assert (shifted.reshape(200, -1).sum(1) == 3 * 255).all()
    assert set(zip(y, x, strict=True)) == {(a, b) for a in range(2, 7) for b in range(2, 7)}
    assert random_shift(np.full((2, 5, 5, 3), 9, np.uint8), 2, np.random.default_rng(0)).min() == 9
    parts = [random_shift(image[at : at + 50], 2, np.random.default_rng(0), at // 50, 4) for at in range(0, 200, 50)]
    np.testing.assert_array_equal(np.concatenate(parts), shifted, "for ranks as for one")


def test_recoveries_are_learned_as_the_recipe_says():
    def weights(*settings):
        target = with_settings(fake(), settings).algorithm.needs().target
        actor = np.array([HUMAN, HUMAN | RECOVERY, POLICY], np.uint8)
        none = np.zeros(3, np.int8)
        return target.weights(StepRuns(actor, none, none > 0, none, np.full(3, np.nan), none), Moment(1)).tolist()

    assert weights() == [1, 1, 0]
    assert weights("algorithm.recovery_weight=0.5") == [1, 0.5, 0]
    assert weights("algorithm.recovery_weight=0") == [1, 0, 0]


def test_rate_warms_up():
    config = TrainingConfig(learning_rate=1.0, warmup_steps=4)
    assert [config.rate(step) for step in (0, 1, 3, 100)] == [0.25, 0.5, 1.0, 1.0]
    assert TrainingConfig(learning_rate=0.1, warmup_steps=0).rate(0) == 0.1


def test_a_cosine_falls_to_a_tenth_and_stays_there():
    config = TrainingConfig(learning_rate=1.0, warmup_steps=10, schedule=RateSchedule.cosine, decay_steps=100)
    assert config.rate(9) == 1.0
    assert config.rate(60) == pytest.approx(0.55)
    assert config.rate(110) == config.rate(10**6) == pytest.approx(0.1)


@pytest.mark.parametrize("field", ["draws", "recent_steps", "recent_share", "recovery_weight"])
def test_settings_that_cannot_work_are_named(field):
    with pytest.raises(ConfigError, match=field):
        HGDagger(**{field: -1})


@pytest.mark.parametrize("field", ["batch", "accumulate", "learning_rate", "shift_px", "ema_decay", "offset_share"])
def test_training_that_cannot_work_is_named(field):
    with pytest.raises(ConfigError, match=field):
        TrainingConfig(**{field: -1})
