"""Checks of values where they are born: each error names the value, the rule and what was given."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from looseleaf.errors import ConfigError


def check_whole(
    name: str, value: Any, *, low: int, high: int | None = None, error: type[Exception] = ConfigError
) -> None:
    """A whole number within bounds; True and 3.0 are none."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise error(f"{name} must be a whole number, got {value!r}")
    _check_bounds(name, value, low, high, error)


def check_number(
    name: str, value: Any, *, low: float, high: float | None = None, error: type[Exception] = ConfigError
) -> None:
    """A number within bounds; True and NaN are none."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise error(f"{name} must be a number, got {value!r}")
    _check_bounds(name, value, low, high, error)


def check_truth(name: str, value: Any, *, error: type[Exception] = ConfigError) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise error(f"{name} must be true or false, got {value!r}")


def _check_bounds(name: str, value: Any, low: float, high: float | None, error: type[Exception]) -> None:
    if not (low <= value <= (math.inf if high is None else high)) or math.isinf(value):
        rule = f">= {low}" if high is None else f"between {low} and {high}"
        raise error(f"{name} must be {rule}, got {value!r}")
