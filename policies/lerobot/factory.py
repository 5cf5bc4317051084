"""`--policy lerobot:PATH`: makes the policy, and tells the job what it needs. Imports neither torch nor lerobot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from policies.interface.registry import PolicyDefaults, read_options
from policies.lerobot.checkpoint_path import locate, read_config, require_processors, weights_file
from policies.lerobot.mapping import match, sizes
from policies.lerobot.options import LeRobotOptions, require_lerobot
from wire.types import RobotSpec

if TYPE_CHECKING:
    from policies.lerobot.policy import LeRobotPolicy

_BATCH, _LARGE_BATCH = 16, 8
_LARGE = ("smolvla", "pi0", "pi05", "pi0_fast", "groot", "xvla", "wall_x")
_FRESH_STEPS = 500


def make(checkpoint_path: str, config: dict[str, Any], spec: RobotSpec, seed: int) -> LeRobotPolicy:
    """The policy of the checkpoint at `checkpoint_path` (see `locate`) for the robot `spec`.

    `config` has the fields of `LeRobotOptions`. Raises `ConfigError` or `WeightsError` naming the file and the remedy.
    """
    require_lerobot()
    from policies.lerobot.checkpoint import LeRobotCheckpoint
    from policies.lerobot.policy import LeRobotPolicy

    options = _options(config)
    stored = read_config(locate(checkpoint_path))
    checkpoint = LeRobotCheckpoint.open(checkpoint_path, _override(stored, options))
    return LeRobotPolicy(spec, checkpoint, options, seed)


def defaults(checkpoint_path: str, config: dict[str, Any], spec: RobotSpec) -> PolicyDefaults:
    """Small batches, the checkpoint's own optimizer settings, one step behind each image, and no first training.

    Raises `ConfigError` or `WeightsError` for what files show to be unusable.
    """
    options = _options(config)
    directory = locate(checkpoint_path)
    stored = read_config(directory)
    what = str(directory)
    sizes(spec, stored, match(spec, stored, options.cameras, what), what)
    if not options.fresh:
        weights_file(directory)
    if options.statistics == "checkpoint":
        require_processors(directory)
    fields = stored | _override(stored, options)
    trained = options.fresh or options.statistics == "buffer"
    return PolicyDefaults(
        horizon=_horizon(fields),
        batch=_LARGE_BATCH if stored["type"] in _LARGE else _BATCH,
        ticks_per_frame=1,
        learning_rate=fields.get("optimizer_lr"),
        weight_decay=fields.get("optimizer_weight_decay"),
        gradient_clip=fields.get("optimizer_grad_clip_norm") or 10.0,
        shift_px=0,
        pretrain_steps=_FRESH_STEPS if trained else 0,
        demonstrations=None if trained else 0,
    )


def _options(config: dict[str, Any]) -> LeRobotOptions:
    return read_options(config, LeRobotOptions, "lerobot policy")


def _override(stored: dict[str, Any], options: LeRobotOptions) -> dict[str, Any]:
    """Diffusion gives all actions that it makes from the newest observation on, unless the user says otherwise."""
    if stored["type"] != "diffusion" or "n_action_steps" in options.override:
        return options.override
    fields = stored | options.override
    horizon, seen = fields.get("horizon"), fields.get("n_obs_steps")
    if not isinstance(horizon, int) or not isinstance(seen, int):
        return options.override  # lerobot says what is wrong with it
    return {**options.override, "n_action_steps": horizon - seen + 1}


def _horizon(fields: dict[str, Any]) -> int | None:
    names = ("n_action_steps",) if fields["type"] == "diffusion" else ("chunk_size", "action_chunk_size")
    for name in names:
        if isinstance(value := fields.get(name), int):
            return value
    return None
