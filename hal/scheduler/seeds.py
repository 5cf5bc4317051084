"""Which robot starts its episodes from which seeds, so that no scene is ever both practised and examined.

[0, 500_000)            demonstrations
[500_000, 1_000_000)    training: lanes of 5,000 episodes, one lane a robot
[1_000_000, 2**31)      held out for evaluation
"""

from __future__ import annotations

import msgspec

from wire.errors import ConfigError

TRAINING_SEEDS = range(500_000, 1_000_000)
HELD_OUT_SEEDS = range(1_000_000, 2**31)
LANE_EPISODES = 5_000
SPARE_EPISODES = 500
"""at the end of a lane, for episodes that were aborted and use a seed all the same"""
LANES = len(TRAINING_SEEDS) // LANE_EPISODES
_USED = LANE_EPISODES - SPARE_EPISODES


class Stretch(msgspec.Struct, frozen=True):
    """Seeds in a row."""

    first_seed: int
    episodes: int

    @property
    def seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.episodes)


def lane(index: int) -> range:
    """The training seeds of the fleet's robot number `index`. With more robots than lanes, robots share them."""
    if index < 0:
        raise ConfigError(f"robot number {index}: numbers begin at 0.")
    first = TRAINING_SEEDS.start + index % LANES * LANE_EPISODES
    return range(first, first + LANE_EPISODES)


def training_stretch(index: int, spent: int, episodes: int = 0) -> Stretch:
    """The next training seeds of robot number `index`, which has used `spent` of them: as many as `episodes`, or all
    to where its lane starts over.

    Robots that share a lane begin at other places of it: the n-th at the n-th number of van der Corput's sequence.
    """
    seeds = lane(index)
    place = (round(_van_der_corput(index // LANES) * _USED) + spent) % _USED
    left = _USED - place
    return Stretch(seeds.start + place, min(episodes, left) if episodes else left)


def held_out(first_seed: int, episodes: int) -> Stretch:
    """Seeds for `episodes` of an evaluation, from `first_seed` on (0: where the held-out ones begin).

    Raises `ConfigError` for seeds that are practised or demonstrated.
    """
    stretch = Stretch(first_seed or HELD_OUT_SEEDS.start, episodes)
    if stretch.first_seed < HELD_OUT_SEEDS.start or stretch.first_seed + episodes > HELD_OUT_SEEDS.stop:
        raise ConfigError(
            f"first_seed: seeds {stretch.first_seed} to {stretch.first_seed + episodes - 1} are not held out for "
            f"evaluation. Begin at {HELD_OUT_SEEDS.start} or later, or leave it 0."
        )
    return stretch


def _van_der_corput(n: int) -> float:
    """The n-th number of the sequence 0, 1/2, 1/4, 3/4, 1/8, ... (van der Corput, 1935)."""
    value, half = 0.0, 0.5
    while n:
        n, bit = divmod(n, 2)
        value, half = value + bit * half, half / 2
    return value
