"""Which camera of a robot is which picture of a policy, and whether states and actions fit. Reads JSON alone."""

from __future__ import annotations

import logging
from typing import Any

from wire.errors import ConfigError
from wire.types import RobotSpec

log = logging.getLogger(__name__)

_PICTURES = "observation.images."
_EMPTY = f"{_PICTURES}empty_camera_"
_STATE = "observation.state"
_ACTION = "action"


def match(spec: RobotSpec, config: dict[str, Any], cameras: dict[str, str], what: str) -> dict[str, str]:
    """{feature of the policy: camera of the robot} for every picture it looks at.

    `config` is a lerobot policy's config.json. A feature `observation.images.NAME` is the camera NAME; `cameras` says
    otherwise by {feature or NAME: camera}. A single feature and a single camera that are left are taken to be the same.
    As many pictures may be missing as the configuration has `empty_cameras`. Raises `ConfigError` for a robot that the
    policy does not fit, listing both sides; `what` names the checkpoint.
    """
    features = _features(config, "input_features", what)
    outputs = _features(config, "output_features", what)
    _require_width(what, spec, "state", features.get(_STATE), len(spec.state))
    if _ACTION not in outputs:
        raise ConfigError(f"{what}: its output_features have no '{_ACTION}' but {sorted(outputs)}; it cannot act.")
    _require_width(what, spec, "action", outputs[_ACTION], len(spec.action))
    for name, feature in features.items():
        if feature.get("type") == "ENV" or (feature.get("type") == "STATE" and name != _STATE):
            raise ConfigError(
                f"{what}: it reads '{name}', which a robot does not measure: only {_STATE} and pictures can be given. "
                "Train it without that feature."
            )
    wanted = [n for n, f in features.items() if f.get("type") == "VISUAL" and not n.startswith(_EMPTY)]
    for name in wanted:
        shape = features[name]["shape"]
        if len(shape) != 3 or shape[0] != 3:
            raise ConfigError(
                f"{what}: config.json gives picture '{name}' the shape {shape}, expected [3, HEIGHT, WIDTH]. Copy it "
                "again, or write the size that the policy was trained on."
            )
    empty = config.get("empty_cameras") or 0
    if not isinstance(empty, int) or empty < 0:
        raise ConfigError(f"{what}: config.json has empty_cameras {empty!r}; write how many pictures may be missing.")
    return _matched(spec, wanted, cameras, empty, what)


def _matched(spec: RobotSpec, wanted: list[str], cameras: dict[str, str], may_lack: int, what: str) -> dict[str, str]:
    there = [camera.name for camera in spec.cameras]
    sides = f"The policy looks at {wanted or 'nothing'}, robot '{spec.embodiment}' has {there or 'no camera'}."
    option = 'Say which is which: cameras {"observation.images.NAME": "CAMERA"}.'
    said = {(name if name in wanted else _PICTURES + name): camera for name, camera in cameras.items()}
    for name, camera in said.items():
        if name not in wanted:
            raise ConfigError(f"{what}: cameras names '{name}', which it does not look at. {sides}")
        if camera not in there:
            raise ConfigError(f"{what}: cameras gives '{name}' the camera '{camera}', which is not there. {sides}")
    found = {name: said.get(name, name.removeprefix(_PICTURES)) for name in wanted}
    found = {name: camera for name, camera in found.items() if camera in there}
    lacking = [name for name in wanted if name not in found]
    unused = [camera for camera in there if camera not in found.values()]
    if len(lacking) == 1 and len(unused) == 1 and len(there) == 1:
        log.info("%s: camera '%s' is its only picture '%s'.", what, unused[0], lacking[0])
        found[lacking[0]] = unused[0]
        lacking, unused = [], []
    if len(lacking) > may_lack or (wanted and not found):
        raise ConfigError(f"{what}: no camera for {lacking}. {sides} {option}")
    if lacking:
        log.info("%s: %s stay empty, as its configuration allows.", what, lacking)
    if unused:
        log.info("%s: it does not look at camera %s of robot '%s'.", what, unused, spec.embodiment)
    return {name: found[name] for name in wanted if name in found}


def sizes(spec: RobotSpec, config: dict[str, Any], matched: dict[str, str], what: str) -> dict[str, tuple[int, int]]:
    """{feature: (height, width)} that pictures are brought to; none for a policy that resizes them itself."""
    if config.get("resize_imgs_with_padding") or config.get("image_resolution"):
        return {}
    cameras = {camera.name: (camera.height, camera.width) for camera in spec.cameras}
    found = {}
    for name, camera in matched.items():
        height, width = config["input_features"][name]["shape"][1:]
        if cameras[camera] != (height, width):
            change = "from {}x{} to {}x{}".format(*cameras[camera], height, width)
            log.info("%s: pictures of camera '%s' are resized %s.", what, camera, change)
            found[name] = (height, width)
    return found


def _features(config: dict[str, Any], side: str, what: str) -> dict[str, dict[str, Any]]:
    features = config.get(side)
    if not isinstance(features, dict):
        raise ConfigError(f"{what}: its config.json has no {side}; train it on a dataset, which fills them in.")
    for name, feature in features.items():
        shape = feature.get("shape") if isinstance(feature, dict) else None
        if not isinstance(shape, list | tuple) or not all(type(n) is int and n > 0 for n in shape):
            raise ConfigError(
                f"{what}: config.json, {side}: '{name}' has the shape {shape!r}, which are no sizes. Copy it again, or "
                "train the policy on a dataset, which fills them in."
            )
    return features


def _require_width(what: str, spec: RobotSpec, kind: str, feature: dict[str, Any] | None, width: int) -> None:
    if feature is not None and list(feature["shape"]) != [width]:
        names = [dimension.name for dimension in getattr(spec, kind)]
        raise ConfigError(
            f"{what}: {kind} of {list(feature['shape'])}, but robot '{spec.embodiment}' has {width}: {names}. Use a "
            "checkpoint trained on this robot's data."
        )
