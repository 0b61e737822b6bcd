"""Collects every violation of an input and reports them in one error.

`whole`, `above_zero` and `not_negative` check one number of a description. Each gives no line, or
one that names the value and its fix.
"""

import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

T = TypeVar("T")


class ViolationsError(ValueError):
    """Everything that is wrong with an input.

    Attributes:
        lines: one sentence each: what is wrong and the smallest change that would work.
    """

    def __init__(self, subject: str, lines: Sequence[str]) -> None:
        text = "\n".join(f"  {i + 1}. {line}" for i, line in enumerate(lines))
        super().__init__(f"{subject}: {len(lines)} violation(s)\n{text}")
        self.lines: tuple[str, ...] = tuple(lines)


def raise_all(subject: str, violations: Sequence[str]) -> None:
    """Raise one error that lists all violations, or return when there are none.

    Args:
        subject: what was checked, named in the first line.
        violations: one sentence each.

    Raises:
        ViolationsError: when `violations` is not empty.
    """
    if violations:
        raise ViolationsError(subject, violations)


def collect(found: list[str], where: str, build: Callable[[], T]) -> T | None:
    """Build something; note its violations, each behind `where`, instead of raising them.

    Returns:
        What `build` returns, or None when it refuses.
    """
    try:
        return build()
    except ViolationsError as error:
        found += [f"{where}: {line}" for line in error.lines]
    return None


# -- checks of numbers -------------------------------------------------------------------------


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
