"""What a conformance run found, in words a person can act on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """One rule and how the robot did."""

    name: str
    passed: bool
    message: str = ""
    """what was seen and what to do about it, '' when passed"""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    """what it should be: at most, or at least with `at_least`; None: only told"""
    at_least: bool = False
    advice: str = ""
    """what to do when it is not"""

    @property
    def holds(self) -> bool:
        if self.limit is None:
            return True
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        bound = "" if self.limit is None else f" ({'at least' if self.at_least else 'at most'} {self.limit:.4g})"
        advice = "" if self.holds else f": {self.advice}"
        return f"{'ok  ' if self.holds else 'FAIL'} {self.name} {self.value:.4g} {self.unit}{bound}{advice}"


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """All checks and figures, in the order they were made."""

    checks: tuple[CheckOutcome, ...]
    figures: tuple[Figure, ...] = ()

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks) and all(figure.holds for figure in self.figures)

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of what failed."""
        checks = [check.name for check in self.checks if not check.passed]
        return (*checks, *(figure.name for figure in self.figures if not figure.holds))

    def __str__(self) -> str:
        lines = [f"{'ok  ' if c.passed else 'FAIL'} {c.name}{': ' * bool(c.message)}{c.message}" for c in self.checks]
        total = len(self.checks) + sum(figure.limit is not None for figure in self.figures)
        lines += map(str, self.figures)
        return "\n".join([*lines, f"{total - len(self.failed)} of {total} checks passed"])

    def as_json(self) -> dict[str, Any]:
        """Plain values for a file."""
        figures = [
            {**asdict(figure), "value": float(figure.value), "holds": bool(figure.holds)} for figure in self.figures
        ]
        return {"passed": self.passed, "checks": [asdict(check) for check in self.checks], "figures": figures}
