"""Makes lerobot's own robots and teleoperators from a type name and plain fields, as its command line would.

lerobot registers a configuration under its type name when the module that defines it is imported, so modules are
imported here until the wanted type is there: lerobot's own first by likeness of name, and before them the installed
packages called `lerobot_robot_*`, `lerobot_camera_*` and `lerobot_teleoperator_*`, which lerobot finds itself.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import logging
import pkgutil
from collections.abc import Iterable, Mapping
from typing import Any

from hal.drivers.lerobot.serial_ports import port_fault
from hal.drivers.lerobot.spec import components
from wire.errors import ConfigError, RobotError, suggest

log = logging.getLogger(__name__)
_BEYOND = 0.02
"""of a motor's calibrated range: what gears give way and a person has left out by hand"""

_INSTALL = "pip install 'vla-fleet[lerobot]'"


def make_lerobot(family: str, kind: str, fields: Mapping[str, Any], plugins: Iterable[str] = ()) -> Any:
    """lerobot's robot or teleoperator of type `kind`, not connected.

    `family`: "robot" or "teleoperator"; `fields`: of its own configuration, as in lerobot's JSON, cameras included;
    `plugins`: modules to import first, that register types and are not installed under one of lerobot's names.

    Raises `ConfigError` for an unknown type or a field that is wrong, `RobotError` when a package that it needs is
    missing or its constructor fails.
    """
    config = _config(family, kind, fields, plugins)
    try:
        utils = importlib.import_module(f"lerobot.{family}s.utils")
        return getattr(utils, f"make_{family}_from_config")(config)
    except ImportError as error:
        raise RobotError(_missing(f"lerobot {family} '{kind}'", error)) from error
    except Exception as error:
        # lerobot keeps to itself why it could not import a module whose configuration it could.
        try:
            importlib.import_module(type(config).__module__.rpartition(".")[0])
        except ImportError as cause:
            raise RobotError(_missing(f"lerobot {family} '{kind}'", cause)) from error
        raise RobotError(f"lerobot {family} '{kind}' cannot be made: {type(error).__name__}: {error}.") from error


def connect(device: Any, what: str, kind: str, write_calibration: bool) -> None:
    """Open `device`, of lerobot's type `kind`, whose motors must hold what its calibration file says; with
    `write_calibration` that is written.

    No motor gets torque before its calibration was found to be right, and none of a robot that stands outside of it.
    Raises `RobotError` for a port that is not there, for one that does not answer, was never calibrated or holds
    another calibration; it is closed again then.
    """
    # Without `calibrate`, or lerobot would ask at a terminal; some devices have no such option.
    options = {"calibrate": False} if "calibrate" in inspect.signature(device.connect).parameters else {}
    try:
        for _, part in components(device):
            if hasattr(getattr(part, "bus", None), "read_calibration"):
                check_calibration(
                    part, what, calibration_command(part, kind if part is device else ""), write_calibration
                )
                if hasattr(device, "send_action"):
                    check_places(part, what)
        device.connect(**options)
        for _, part in components(device):
            if not (part.is_calibrated() if callable(part.is_calibrated) else part.is_calibrated):
                raise RobotError(f"{what} has no calibration. {calibration_command(part, kind)}")
    except Exception as error:
        disconnect(device, what)
        if isinstance(error, RobotError):
            raise
        raise RobotError(
            f"{what} cannot be connected: {type(error).__name__}: {' '.join(str(error).split())}. Check its power, its "
            "cable and the port in `fields`; `lerobot-find-port` finds it."
        ) from error


def check_calibration(part: Any, what: str, way_out: str, write: bool = False) -> None:
    """Compare what the motors of `part`, which is closed before and after, hold with its calibration file.

    Torque stays as it is, unless the file is to be written. Raises `RobotError` that names what differs,
    and `way_out`.
    """
    bus, file, known = part.bus, getattr(part, "calibration_fpath", "?"), getattr(part, "calibration", None)
    if fault := port_fault(str(bus.port)):
        raise RobotError(f"{what}: {fault}")
    if not known:
        raise RobotError(f"{what} has no calibration at {file}. {way_out}")
    if wrong := [
        f"'{name}' is motor {known[name].id} there and {motor.id} here" if name in known else f"no '{name}' there"
        for name, motor in bus.motors.items()
        if name not in known or known[name].id != motor.id
    ]:
        raise RobotError(f"{what}: {file} is of other motors: {', '.join(wrong)}. {way_out}")
    bus.connect()
    try:
        if part.is_calibrated() if callable(part.is_calibrated) else part.is_calibrated:
            return
        if not write:
            raise RobotError(
                f"{what}: its motors hold another calibration than {file}: {_differences(bus, known)}. Positions would "
                f"be wrong. {way_out} Or give write_calibration=True if the file is right."
            )
        log.info("%s: the calibration of %s is written into its motors.", what, file)
        bus.disable_torque()
        bus.write_calibration(known)
    finally:
        bus.disconnect(disable_torque=False)


def check_places(part: Any, what: str) -> None:
    """Raise `RobotError` for motors of `part`, which is closed before and after, that stand outside their calibration.

    With torque such a motor goes to the end of it by itself, as fast as it can, whatever it is told.
    """
    bus, known = part.bus, part.calibration
    bus.connect()
    try:
        places = bus.sync_read("Present_Position", normalize=False, num_retry=2)
    finally:
        bus.disconnect(disable_torque=False)
    outside = []
    for name, at in places.items():
        low, high = known[name].range_min, known[name].range_max
        if not -_BEYOND * (high - low) <= at - low <= (1 + _BEYOND) * (high - low):
            outside.append(f"{name} at {at}, calibrated from {low} to {high}")
    if outside:
        raise RobotError(
            f"{what} gets no torque, for it would jump: {'; '.join(outside)}. Bring it back by hand; if it belongs "
            "there, calibrate it anew."
        )


def _differences(bus: Any, known: Mapping[str, Any]) -> str:
    """What the motors hold and the file says, by joint."""
    return "; ".join(
        f"{name}: {', '.join(f'{what} {mine} instead of {theirs}' for what, mine, theirs in found)}"
        for name, held in bus.read_calibration().items()
        if (
            found := [
                (what.replace("_", " "), getattr(held, what), getattr(known[name], what))
                for what in ("homing_offset", "range_min", "range_max")
                if getattr(held, what) != getattr(known[name], what)
            ]
        )
    )


def calibration_command(part: Any, kind: str) -> str:
    """The command that calibrates `part`. `kind`: lerobot registers one class under several types."""
    family, config = ("robot" if hasattr(part, "send_action") else "teleop"), getattr(part, "config", None)
    said = {
        "type": kind or getattr(config, "type", "TYPE"),
        "port": getattr(config, "port", "PORT"),
        "id": getattr(part, "id", "ID"),
    }
    return f"Run `lerobot-calibrate {' '.join(f'--{family}.{name}={value}' for name, value in said.items())}`."


def disconnect(device: Any, what: str) -> None:
    """Close `device`, also one that is half connected or unplugged: its port can be opened again."""
    try:
        if device.is_connected:
            device.disconnect()
    except Exception as error:  # noqa: BLE001 - it may be unplugged
        log.error("%s did not disconnect cleanly: %s", what, error)
    for _, part in components(device):
        port = getattr(getattr(part, "bus", None), "port_handler", None)
        if port is not None and getattr(port, "is_open", False):
            port.closePort()


def _config(family: str, kind: str, fields: Mapping[str, Any], plugins: Iterable[str]) -> Any:
    what = f"lerobot {family} '{kind}'"
    try:
        registry = importlib.import_module(f"lerobot.{family}s.config")
        draccus = importlib.import_module("draccus")
        importlib.import_module("lerobot.utils.import_utils").register_third_party_plugins()
    except ImportError as error:
        raise RobotError(_missing(what, error)) from error
    for plugin in plugins:
        try:
            importlib.import_module(plugin)
        except Exception as error:  # whatever a third party's module does when it is imported
            raise RobotError(f"{what}: its plugin '{plugin}' cannot be imported: {error}. Is it installed?") from error
    choices = getattr(registry, f"{family.capitalize()}Config")
    broken = _import_until(f"lerobot.{family}s", kind, choices)
    cameras = importlib.import_module("lerobot.cameras.configs").CameraConfig
    for camera in dict(fields.get("cameras") or {}).values():
        if isinstance(camera, Mapping) and "type" in camera:
            _import_until("lerobot.cameras", str(camera["type"]), cameras)
    known = sorted(choices.get_known_choices())
    if kind not in known:
        # The module that would have registered it may be one of those that need a package which is not there.
        like = difflib.get_close_matches(kind, broken, n=1, cutoff=0.6)
        if like:
            raise RobotError(_missing(what, broken[like[0]]))
        raise ConfigError(
            f"no {what}.{suggest(kind, known)} lerobot knows: {', '.join(known)}. A package called "
            f"lerobot_{family}_NAME adds one; a module of another name goes into `plugins`."
        )
    try:
        return draccus.decode(choices, {"type": kind, **fields})
    except Exception as error:  # draccus' own errors and those of the configuration's checks
        raise ConfigError(f"{what}: its fields are not valid: {error}") from error


def _import_until(package: str, kind: str, choices: Any) -> dict[str, Exception]:
    """Import modules of `package` until `kind` is registered in `choices`; why each failed that did, by name."""
    broken: dict[str, Exception] = {}
    names = [module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__) if module.ispkg]
    for name in sorted(names, key=lambda name: -difflib.SequenceMatcher(None, name, kind).ratio()):
        if kind in choices.get_known_choices():
            break
        try:
            importlib.import_module(f"{package}.{name}")
        except Exception as error:  # noqa: BLE001 - a driver's dependency may fail in any way; the others still count
            broken[name] = error
    return broken


def _missing(what: str, error: Exception) -> str:
    package = getattr(error, "name", None)
    if package and package.partition(".")[0] in ("lerobot", "draccus"):
        return f"{what}: lerobot is not installed: {error}. Install it: {_INSTALL}."
    if package:
        return f"{what} needs the package '{package}', which is not installed. Install what lerobot's page of it names."
    return f"{what} cannot be loaded: {type(error).__name__}: {error}. Install what it needs or choose another."
