"""The recipe of any arm of lerobot with a leader arm: what its make says here, what one bench says in a TOML file.

The spec is made of constants, so gateway and trainer need neither lerobot nor the arm's calibration, and all arms of
one make share it; each arm is held to what its own calibration reaches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cloud_learner.algorithms.hg_dagger import HGDagger
from cloud_learner.training.config import TrainingConfig
from fleet.config.bench import ArmTable, BenchConfig, BesideTable, CameraTable, LimitsTable, read_table
from fleet.config.recipe import DeviceChoice, NamedPolicy, Recipe
from hal.drivers.lerobot.spec import ENCODER_DEG, DimensionConfig, LeRobotConfig
from hal.drivers.with_cameras import CameraChoice, CameraRobotConfig
from hal.interfaces.dynamics import SpecMotion, require_dimension
from hal.safety.limits import SafetyLimits
from hal.stop_devices.config import StopDevicesConfig
from policies.interface.registry import PolicyChoice
from robot_edge.chunking.config import ChunkingConfig
from robot_edge.control.config import EpisodeRules, LoopConfig, ObservationLimits
from robot_edge.inference.server import SlowConfig
from wire.errors import ConfigError
from wire.types import CameraSpec, Dimension, RobotSpec

MAX_DELAY = 12
"""ticks of age that training simulates, at 30 Hz: a thought every 0.2 s and 0.2 s of inference delay"""


@dataclass(frozen=True, slots=True)
class JointModel:
    """One joint of a make of arm."""

    name: str
    """lerobot's, without `.pos`"""
    low: float
    high: float
    velocity: float
    """per second, in the joint's unit, as all below"""
    acceleration: float
    stop_deceleration: float
    rest: float
    """where episodes begin"""
    unit: str = "deg"


@dataclass(frozen=True, slots=True)
class ArmModel:
    """A make of arm."""

    follower: str
    """lerobot's type of the robot"""
    leader: str
    """lerobot's type of the arm that a person moves"""
    joints: tuple[JointModel, ...]
    control_hz: float = 30.0
    modules: tuple[str, ...] = ()
    """that its driver imports, once for all processes of the robot's computer"""


def arm_recipe(name: str, model: ArmModel, config: Path | None) -> Recipe:
    """The recipe of an arm of that make on the bench that `config` describes. Raises `ConfigError`."""
    if config is None:
        raise ConfigError(_what_to_write(name))
    bench = read_table(config, BenchConfig)
    for key, camera in bench.cameras.items():
        if camera.kind == "opencv" and camera.device == "":
            raise ConfigError(
                f"--config {config}: cameras.{key} has no device; there are: {_listed('video*', 'v4l/by-id/*')}."
            )
    where = f"--config {config}: "
    spec = _spec(model, bench)
    driver = CameraRobotConfig(
        "lerobot",
        tuple(CameraChoice(camera.kind, _camera(key, camera)) for key, camera in bench.cameras.items()),
        asdict(_arm(model, bench, where)),
    )
    leader = bench.leader
    return Recipe(
        name=name,
        tasks=tuple(bench.tasks),
        instructions=dict(bench.tasks),
        robot="with-cameras",
        robot_config=driver,
        unpaced_config=driver,
        people_only=True,
        teleoperator=None
        if leader is None
        else DeviceChoice(
            "lerobot",
            {"type": model.leader, "fields": _fields(leader), "engage": leader.engage, "speed": leader.speed},
        ),
        modules=model.modules,
        spec=spec,
        make_policy=NamedPolicy(PolicyChoice("flow", "pixels", {"max_offset": MAX_DELAY})),
        motion=SpecMotion(spec),
        demonstrations=bench.episodes.demonstrations,
        slow=SlowConfig(every_s=0.2),
        chunking=ChunkingConfig(execute_ticks=6),
        # gentler and longer than in a simulator: a person's demonstrations are few, and no version is worth a jerk
        algorithm=HGDagger(recent_share=0.25),
        training=TrainingConfig(
            batch=32,
            ticks_per_frame=4,
            offset_share=0.5,
            warmup_steps=50,
            betas=(0.9, 0.95),
            ema_decay=0.995,
            shift_px=3,
            pretrain_steps=2000,
            publish_every_s=60.0,
        ),
        loop=LoopConfig(
            max_ticks=round(bench.episodes.seconds * model.control_hz),
            episodes=EpisodeRules(reset_s=bench.episodes.reset_seconds),
            safety=_limits(model, bench.limits, where),
            # the noise of a real camera makes every picture another, also of an arm that stands
            observation_limits=ObservationLimits(
                repeats_while_still=all(c.kind == "opencv" for c in bench.cameras.values())
            ),
        ),
        checkpoint_every_s=60.0,
        stop_devices=_stop_devices(bench.beside, where),
        speed_limit=bench.beside.speed_limit,
    )


def _stop_devices(beside: BesideTable, where: str) -> StopDevicesConfig:
    try:
        return StopDevicesConfig(beside.stop_keys, beside.stop_lines, beside.keys)
    except ConfigError as error:
        raise ConfigError(f"{where}[beside]: {error}") from error


def _spec(model: ArmModel, bench: BenchConfig) -> RobotSpec:
    """As `hal.drivers.lerobot.spec.lerobot_spec` makes it of `_arm`, with the cameras behind."""
    reach = {"deg": (-ENCODER_DEG, ENCODER_DEG)}
    states = tuple(Dimension(f"{j.name}.pos", j.unit, *reach.get(j.unit, (j.low, j.high))) for j in model.joints)
    actions = tuple(Dimension(f"{j.name}.pos", j.unit, j.low, j.high) for j in model.joints)
    cameras = tuple(CameraSpec(key, *camera.picture, camera.fps) for key, camera in bench.cameras.items())
    return RobotSpec(model.follower, states, actions, cameras, model.control_hz)


def _arm(model: ArmModel, bench: BenchConfig, where: str) -> LeRobotConfig:
    rest = {j.name: j.rest for j in model.joints} if bench.rest_pose is None else bench.rest_pose
    return LeRobotConfig(
        model.follower,
        _fields(bench.robot),
        dict(bench.tasks),
        model.control_hz,
        # The state is as far as an encoder measures: a joint can be pushed out of its range.
        dimensions={f"action.{j.name}.pos": DimensionConfig(j.unit, j.low, j.high) for j in model.joints},
        rest_pose=_by_dimension(f"{where}rest_pose", rest, model),
    )


def _fields(arm: ArmTable) -> dict[str, Any]:
    place = {"calibration_dir": arm.calibration_dir} if arm.calibration_dir else {}
    return {"port": arm.port, "id": arm.id, **place, **arm.fields}


def _camera(name: str, camera: CameraTable) -> dict[str, Any]:
    height, width = camera.picture
    common = {"name": name, "height": height, "width": width, "rate_hz": camera.fps}
    if camera.kind == "opencv":
        asked = {"device": camera.device, "device_height": camera.height, "device_width": camera.width}
        shown = {"preview_height": camera.height, "preview_width": camera.width}
        common |= {**asked, **shown, "device_hz": camera.fps}
    return common | camera.config


def _limits(model: ArmModel, given: LimitsTable, where: str) -> SafetyLimits:
    usual = {
        kind: {f"{joint.name}.pos": getattr(joint, kind) for joint in model.joints}
        for kind in ("velocity", "acceleration", "stop_deceleration")
    }
    changed = {kind: _by_dimension(f"{where}limits.{kind}", getattr(given, kind), model) for kind in usual}
    merged = {kind: table | changed[kind] for kind, table in usual.items()}
    # Who allows more acceleration than the make's stop has not asked for a softer stop.
    hardest = {name: max(value, merged["acceleration"][name]) for name, value in merged["stop_deceleration"].items()}
    return SafetyLimits(merged["velocity"], merged["acceleration"], hardest | changed["stop_deceleration"])


def _by_dimension(what: str, table: Mapping[str, float], model: ArmModel) -> dict[str, float]:
    for joint in table:
        require_dimension(what, joint, [j.name for j in model.joints])
    return {f"{joint}.pos": value for joint, value in table.items()}


def _what_to_write(name: str) -> str:
    ports, cameras = _listed("serial/by-id/*", "ttyACM*", "ttyUSB*"), _listed("v4l/by-id/*", "video*")
    return (
        f"recipe '{name}' is of a real arm and needs --config FILE.toml that says which. Write, or copy "
        "docs/examples/bench.toml:\n\n"
        '    [robot]\n    port = "/dev/ttyACM0"\n    id = "bench"          # as lerobot-calibrate was told\n'
        '    [leader]\n    port = "/dev/ttyACM1"\n    id = "bench"\n'
        "    [cameras.front]\n    device = 0\n    [cameras.wrist]\n    device = 2\n"
        '    [tasks]\n    pick = "pick up the cube"\n\n'
        f"Serial ports here: {ports} (`lerobot-find-port` tells which is which). Cameras here: {cameras} "
        "(`lerobot-find-cameras opencv` shows their pictures)."
    )


def _listed(*patterns: str) -> str:
    return ", ".join(str(path) for pattern in patterns for path in sorted(Path("/dev").glob(pattern))) or "none"
