"""Report every violation of an input at once."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class ViolationsError(ValueError):
    """Everything that is wrong with an input.

    Attributes:
        lines: one sentence each: what is wrong and the smallest change that would work.
    """

    def __init__(self, subject: str, lines: Sequence[str]) -> None:
        text = "\n".join(f"  {i + 1}. {line}" for i, line in enumerate(lines))
        super().__init__(f"{subject}: {len(lines)} violation(s)\n{text}")
        self.lines = tuple(lines)


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
