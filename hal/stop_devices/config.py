"""What a robot's host watches beside its robot, as a person writes it down."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from wire.errors import ConfigError, suggest
from wire.types import OperatorCommandKind

_KEY_PREFIXES = ("KEY_", "BTN_")
ACTIVE_LOW = "active-low"
COMMANDS = tuple(
    kind.value
    for kind in OperatorCommandKind
    if kind
    not in (
        OperatorCommandKind.command,
        OperatorCommandKind.estop,
        OperatorCommandKind.release_estop,
        OperatorCommandKind.drop_link,
        OperatorCommandKind.speed_limit,
    )
)
"""what a key may say: neither what needs a number or names a stop, nor a stop, which has a way of its own"""


@dataclass(frozen=True, slots=True)
class StopDevicesConfig:
    """Each one raises `ConfigError` for what cannot be understood."""

    stop_keys: tuple[str, ...] = ()
    """DEVICE[:KEY] of a pedal or keyboard: its path, its name in /dev/input/by-id, or what it calls itself; KEY as the
    kernel has it, such as KEY_B; without one every key of it stops the robot"""
    stop_lines: tuple[str, ...] = ()
    """CHIP:LINE[:active-low] of a GPIO line with a normally closed contact: to ground (pulled up, high stops the
    robot), with `active-low` to the supply (pulled down, low stops it); LINE by number or name"""
    keys: tuple[str, ...] = ()
    """DEVICE:KEY=COMMAND: a key that gives an operator's command"""

    def __post_init__(self) -> None:
        for text in self.stop_keys:
            read_key(text)
        for text in self.stop_lines:
            read_line(text)
        for text in self.keys:
            read_command_key(text)

    def __add__(self, other: StopDevicesConfig) -> StopDevicesConfig:
        """Both of them."""
        return StopDevicesConfig(
            *(tuple(dict.fromkeys((*getattr(self, one.name), *getattr(other, one.name)))) for one in fields(self))
        )


def read_key(text: str, option: str = "--stop-key") -> tuple[str, str]:
    """(device, key or '') of DEVICE[:KEY]; names of devices may have colons too. Raises `ConfigError`."""
    device, colon, key = text.rpartition(":")
    if not (colon and key.upper().startswith(_KEY_PREFIXES)):
        device, key = text, ""
    if not device.strip():
        raise ConfigError(f"{option} '{text}': say DEVICE or DEVICE:KEY, such as /dev/input/event3:KEY_B.")
    return device, key.upper()


def read_command_key(text: str) -> tuple[str, str, str]:
    """(device, key, command) of DEVICE:KEY=COMMAND. Raises `ConfigError`."""
    binding, equals, command = text.rpartition("=")
    device, key = read_key(binding, "--key") if equals and binding else ("", "")
    if not key:
        raise ConfigError(f"--key '{text}': say DEVICE:KEY=COMMAND, such as /dev/input/event3:KEY_B={COMMANDS[0]}.")
    if command not in COMMANDS:
        raise ConfigError(f"--key '{text}': no command '{command}'.{suggest(command, COMMANDS)} {_listed(COMMANDS)}")
    return device, key, command


def read_line(text: str) -> tuple[str, int | str, bool]:
    """(path of the chip, line, whether low stops the robot) of CHIP:LINE[:active-low]. Raises `ConfigError`."""
    chip, *rest = text.split(":")
    if not chip or len(rest) not in (1, 2) or not rest[0] or rest[1:] not in ([], [ACTIVE_LOW]):
        raise ConfigError(
            f"--stop-line '{text}': say CHIP:LINE or CHIP:LINE:{ACTIVE_LOW}, such as gpiochip0:17; LINE by number or "
            "name."
        )
    path = chip if chip.startswith("/") else f"/dev/{chip}"
    return path, int(rest[0]) if rest[0].isdecimal() else rest[0], len(rest) == 2


def _listed(names: Iterable[str]) -> str:
    return f"There are {', '.join(names)}."
