"""Check numbers of a description: each function gives no line, or one that names value and fix."""

import math
from numbers import Integral, Real
from typing import Any


def whole(label: str, value: Any, least: int = 1) -> list[str]:
    """Refuse what is no whole number of at least `least`."""
    fine = isinstance(value, Integral) and not isinstance(value, bool) and value >= least
    return [] if fine else [f"{label} is {value!r}: use a whole number of at least {least}"]


def above_zero(label: str, value: Any, most: float = math.inf) -> list[str]:
    """Refuse what is no number in (0, most]."""
    if _is_number(value) and 0 < value <= most:
        return []
    limit = "" if most == math.inf else f" and at most {most:g}"
    return [f"{label} is {value!r}: use a number above 0{limit}"]


def not_negative(label: str, value: Any) -> list[str]:
    """Refuse what is no number of 0 or more."""
    fine = _is_number(value) and value >= 0
    return [] if fine else [f"{label} is {value!r}: use a number of 0 or more"]


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
