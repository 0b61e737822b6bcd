"""Collects every violation of an input and reports them in one error.

`whole`, `above_zero` and `not_negative` check one number of a description. Each gives no line, or
one that names the value and its fix.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

T = TypeVar("T")


class ViolationsError(ValueError):
    """Every violation of an input.

    Attributes:
        lines: one sentence each: the violation and the smallest change that would work.
    """

    def __init__(self, subject: str, lines: Sequence[str]) -> None:
        text = "\n".join(f"  {i + 1}. {line}" for i, line in enumerate(lines))
        super().__init__(f"{subject}: {len(lines)} violation(s)\n{text}")
        self.lines: tuple[str, ...] = tuple(lines)


def raise_all(subject: str, violations: Sequence[str]) -> None:
    """Raise one error that lists all violations, or return when there are none.

    Args:
        subject: the input that was checked, named in the first line.
        violations: one sentence each.

    Raises:
        ViolationsError: when `violations` is not empty.
    """
    if violations:
        raise ViolationsError(subject, violations)


def collect(found: list[str], where: str, build: Callable[[], T]) -> T | None:
    """Call `build`; collect the violations it raises, each after `where`, instead of raising them.

    Returns:
        The result of `build`, or None when it refuses.
    """
    try:
        return build()
    except ViolationsError as error:
        found += [f"{where}: {line}" for line in error.lines]
    return None


def is_unknown(name: Any, known: Iterable[str], fix: str = "use") -> str:
    """`is unknown (did you mean X?): use X, Y, Z`; without X where no known name is near."""
    known = [str(each) for each in known]
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"is unknown{hint}: {fix} {', '.join(known)}"


# -- checks of numbers -------------------------------------------------------------------------


def whole(label: str, value: Any, least: int = 1) -> list[str]:
    """A violation unless the value is a whole number of at least `least`."""
    fine = isinstance(value, Integral) and not isinstance(value, bool) and value >= least
    return [] if fine else [f"{label} is {value!r}: use a whole number of at least {least}"]


def above_zero(label: str, value: Any, most: float = math.inf) -> list[str]:
    """A violation unless the value is a number in (0, most]."""
    if _is_number(value) and 0 < value <= most:
        return []
    limit = "" if most == math.inf else f" and at most {most:g}"
    return [f"{label} is {value!r}: use a number above 0{limit}"]


def not_negative(label: str, value: Any) -> list[str]:
    """A violation unless the value is a number of 0 or more."""
    fine = _is_number(value) and value >= 0
    return [] if fine else [f"{label} is {value!r}: use a number of 0 or more"]


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
