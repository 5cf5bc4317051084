"""Which robot starts its episodes from which seeds, so that no scene is ever both practised and examined.

[0, 500_000)            demonstrations
[500_000, 1_000_000)    training: partitions of 5,000 episodes, one a robot
[1_000_000, 2**31)      held out for evaluation
"""

from __future__ import annotations

from wire.errors import ConfigError

TRAINING_SEEDS = range(500_000, 1_000_000)
HELD_OUT_SEEDS = range(1_000_000, 2**31)
PARTITION_EPISODES = 5_000
SPARE_EPISODES = 500
"""at the end of a partition, for episodes that were aborted and use a seed all the same"""
PARTITIONS = len(TRAINING_SEEDS) // PARTITION_EPISODES
_USED = PARTITION_EPISODES - SPARE_EPISODES


def seed_partition(index: int) -> range:
    """The training seeds of the fleet's robot number `index`. With more robots than partitions, robots share them."""
    first = TRAINING_SEEDS.start + index % PARTITIONS * PARTITION_EPISODES
    return range(first, first + PARTITION_EPISODES)


def training_seeds(index: int, spent: int) -> range:
    """The next training seeds of robot number `index`, which has used `spent`: to where its partition starts over.

    Robots that share a partition begin at different seeds of it: the n-th at the n-th number of the sequence
    0, 1/2, 1/4, 3/4, 1/8, ... (van der Corput, 1935).
    """
    n = index // PARTITIONS
    share = int(f"{n:b}"[::-1], 2) / 2 ** n.bit_length()
    usable = seed_partition(index)[:_USED]
    return usable[(round(share * _USED) + spent) % _USED :]


def held_out_seeds(first_seed: int, episodes: int) -> range:
    """Seeds for `episodes` of an evaluation, from `first_seed` on (0: where the held-out ones begin).

    Raises `ConfigError` for seeds that are practised or demonstrated.
    """
    first = first_seed or HELD_OUT_SEEDS.start
    if first < HELD_OUT_SEEDS.start or first + episodes > HELD_OUT_SEEDS.stop:
        raise ConfigError(
            f"first_seed: seeds {first} to {first + episodes - 1} are not held out for evaluation. Begin at "
            f"{HELD_OUT_SEEDS.start} or later, or leave it 0."
        )
    return range(first, first + episodes)
