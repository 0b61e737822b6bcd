"""Report every violation of an input at once."""

from collections.abc import Sequence


def raise_all(subject: str, violations: Sequence[str]) -> None:
    """Raise one ValueError that lists all violations, or return when there are none.

    Args:
        subject: what was checked, named in the first line.
        violations: one sentence each: what is wrong and the smallest change that would work.

    Raises:
        ValueError: when `violations` is not empty.
    """
    if violations:
        lines = "\n".join(f"  {i + 1}. {text}" for i, text in enumerate(violations))
        raise ValueError(f"{subject}: {len(violations)} violation(s)\n{lines}")
