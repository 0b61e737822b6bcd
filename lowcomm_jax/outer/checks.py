"""Argument checks shared by the outer and landing rules: all violations in one message."""

from collections.abc import Iterable
from numbers import Real
from typing import Any

from lowcomm_jax.network.errors import is_unknown


def raise_all(where: str, violations: Iterable[str | None]) -> None:
    """Raise one ValueError that lists every violation, or return when there is none.

    Args:
      where: the call that is being checked, for the first line of the message.
      violations: one line each, with its fix; ``None`` entries are checks that passed.

    Raises:
      ValueError: at least one violation is not None.
    """
    found = [line for line in violations if line is not None]
    if found:
        raise ValueError("\n  - ".join([f"{where}:", *found]))


def in_range(
    name: str,
    value: Any,
    low: float,
    high: float,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> str | None:
    """Describe how ``value`` leaves the interval, or return None when it lies inside.

    Arrays, tracers, trees and callables pass, since only a Python or NumPy scalar has a value when
    a rule is built. ``optax.inject_hyperparams`` builds rules with traced arguments.
    """
    if not isinstance(value, Real):
        return None
    above = value > low if open_low else value >= low
    below = value < high if open_high else value <= high
    if above and below:
        return None
    interval = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
    return f"{name}={value!r} is outside {interval}: choose a value inside it"


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> str | None:
    """Describe an unknown choice, or return None when ``value`` is allowed."""
    if value in allowed:
        return None
    return f"{name}={value!r} {is_unknown(value, allowed, 'choose one of')}"


def rates(learning_rate: Any, momentum: Any) -> list[str | None]:
    """What is wrong with an outer learning rate, and with a momentum in [0, 1)."""
    return [
        in_range("learning_rate", learning_rate, 0.0, float("inf")),
        in_range("momentum", momentum, 0.0, 1.0, open_high=True),
    ]
