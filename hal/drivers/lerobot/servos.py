"""What the servos of a lerobot arm say of themselves, with the torque as it is or off: for a doctor.

Nothing here commands a motor to go anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from hal.conformance.report import CheckOutcome, Figure
from hal.drivers.lerobot.make import calibration_command, check_calibration, check_places, make_lerobot
from hal.drivers.lerobot.serial_ports import port_fault
from hal.drivers.lerobot.spec import components
from wire.clock import Clock
from wire.errors import RobotError

_HOTTEST_C = 60.0
"""an STS3215 takes its torque away at 70 degrees Celsius, by its data sheet"""
_LOWEST_V, _HIGHEST_V = 4.5, 14.0
"""what an STS3215 works with; a supply that sags below makes it lose its goal"""
_SAMPLE_S = 0.02


def examine_servos(
    family: str, kind: str, fields: Mapping[str, Any], plugins: Sequence[str] = ()
) -> tuple[list[CheckOutcome], list[Figure]]:
    """Port, motors, calibration, voltage and temperature of lerobot's robot or teleoperator of type `kind`.

    Raises `ConfigError` for a configuration that is none.
    """
    device = make_lerobot(family, kind, fields, plugins)
    checks: list[CheckOutcome] = []
    figures: list[Figure] = []
    for prefix, part in components(device):
        bus: Any = getattr(part, "bus", None)
        name = f"{kind} {prefix}".rstrip(" _")
        if not hasattr(bus, "read_calibration"):
            continue
        fault = port_fault(str(bus.port))
        checks.append(CheckOutcome(f"{name} port {bus.port}", not fault, fault))
        if fault:
            continue
        way_out = calibration_command(part, kind if part is device else "")
        try:
            check_calibration(part, name, way_out)
            if hasattr(device, "send_action"):
                check_places(part, name)
            checks.append(CheckOutcome(f"{name} motors and calibration", True))
            figures += _health(name, bus)
        except Exception as error:  # noqa: BLE001 - whatever the bus raises is what is wrong with it
            text = str(error) if isinstance(error, RobotError) else f"{type(error).__name__}: {error}"
            checks.append(CheckOutcome(f"{name} motors and calibration", False, " ".join(text.split())))
            _close(bus)
    return checks, figures


def record_by_hand(
    kind: str, fields: Mapping[str, Any], plugins: Sequence[str], seconds: float, clock: Clock
) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Take the torque of lerobot's robot `kind` away and watch how a person moves it.

    (names of its dimensions, seconds float64[n], positions float64[n, d] in its units). Raises `RobotError` for an arm
    that is not there or not calibrated as its file says; its torque is off afterwards.
    """
    device = make_lerobot("robot", kind, fields, plugins)
    buses = [part.bus for _, part in components(device) if hasattr(getattr(part, "bus", None), "read_calibration")]
    if not buses:
        raise RobotError(f"robot '{kind}' has no bus of motors that could be moved by hand.")
    for _, part in components(device):
        if getattr(part, "bus", None) in buses:
            check_calibration(part, f"robot '{kind}'", calibration_command(part, kind if part is device else ""))
    times: list[float] = []
    rows: list[dict[str, float]] = []
    with _limp(buses, kind):
        begun_ns = due_ns = clock.now_ns()
        while clock.now_ns() - begun_ns < seconds * 1e9:
            seen: dict[str, float] = {}
            for prefix, part in components(device):
                if getattr(part, "bus", None) in buses:
                    read = part.bus.sync_read("Present_Position", num_retry=2)
                    seen |= {f"{prefix}{name}.pos": value for name, value in read.items()}
            times.append((clock.now_ns() - begun_ns) / 1e9)
            rows.append(seen)
            due_ns = max(due_ns + round(_SAMPLE_S * 1e9), clock.now_ns())
            clock.sleep_until(due_ns)
    names = list(rows[0])
    return names, np.array(times), np.array([[row[name] for name in names] for row in rows])


@contextmanager
def _limp(buses: Sequence[Any], kind: str) -> Iterator[None]:
    """The buses open, and no motor with torque."""
    try:
        for bus in buses:
            bus.connect()
            bus.disable_torque()
        yield
    except Exception as error:
        raise RobotError(
            f"robot '{kind}' cannot be watched: {type(error).__name__}: {' '.join(str(error).split())}. Check its "
            "cable and power."
        ) from error
    finally:
        for bus in buses:
            _close(bus)


def _health(name: str, bus: Any) -> list[Figure]:
    """Lowest and highest voltage and the highest temperature; nothing of motors that do not say."""
    bus.connect()
    try:
        table: Mapping[str, Any] = next(iter(bus.model_ctrl_table.values()), {})
        if not {"Present_Voltage", "Present_Temperature"} <= set(table):
            return []
        volts = {m: bus.read("Present_Voltage", m, normalize=False, num_retry=2) / 10 for m in bus.motors}
        celsius = {m: bus.read("Present_Temperature", m, normalize=False, num_retry=2) for m in bus.motors}
    finally:
        _close(bus)
    low, high, hot = min(volts, key=volts.get), max(volts, key=volts.get), max(celsius, key=celsius.get)  # type: ignore[arg-type]
    supply = "Check the power supply and its plug."
    return [
        Figure(f"{name} lowest voltage ({low})", volts[low], "V", _LOWEST_V, at_least=True, advice=supply),
        Figure(f"{name} highest voltage ({high})", volts[high], "V", _HIGHEST_V, advice=supply),
        Figure(f"{name} temperature ({hot})", celsius[hot], "degrees C", _HOTTEST_C, advice="Let it cool down."),
    ]


def _close(bus: Any) -> None:
    if bus.is_connected:
        bus.disconnect(disable_torque=False)
