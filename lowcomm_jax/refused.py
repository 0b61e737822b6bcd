"""`Refused`: the one error of settings that cannot work, rows of a table, checks of single values.

Whoever is given settings collects every problem, one line with its fix each, and raises them at
once: `refuse(title, lines)`. Whoever builds parts of others takes their lines over (`collect`).
Settings that cannot work together are rows (`Row`), which `found_by` reads.
"""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Integral, Real
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Refused(ValueError):
    """Everything that is wrong with an input.

    Attributes:
      lines: one sentence each, once each: what is wrong, and the smallest change that would work.
    """

    def __init__(self, title: str, lines: Iterable[str]):
        self.lines: tuple[str, ...] = tuple(dict.fromkeys(lines))
        super().__init__("\n- ".join([f"{title}:", *self.lines]))


def refuse(title: str, lines: Iterable[str | None]) -> None:
    """Raise one `Refused` that lists these lines, or return where there are none.

    Args:
      title: what was checked.
      lines: None stands for a check that passed.

    Raises:
      Refused: at least one line is not None.
    """
    found = [line for line in lines if line is not None]
    if found:
        raise Refused(title, found)


def collect(found: list[str], prefix: str, build: Callable[[], T]) -> T | None:
    """What `build()` gives; None where it refuses, and each of its lines joins `found`.

    Args:
      prefix: stands before each line.
    """
    try:
        return build()
    except Refused as error:
        found += [prefix + line for line in error.lines]
    except ValueError as error:
        found.append(f"{prefix}{error}")
    return None


def imported(module: str, label: str) -> ModuleType:
    """The module of what somebody names as `module:name`.

    Args:
      label: the setting and its value, for the error.

    Raises:
      ValueError: there is no such module, or it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        fix = "name a module that Python finds from here"
        raise ValueError(f"{label}: {error}; {fix}") from error
    except Exception as error:  # whatever the module does while it is imported
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{label}: {module} cannot be imported: {why}") from error


def is_unknown(name: Any, known: Iterable[str], fix: str = "use") -> str:
    """`is unknown (did you mean X?): use X, Y, Z`; without X where no known name is near."""
    known = [str(each) for each in known]
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"is unknown{hint}: {fix} {', '.join(known)}"


class Row(NamedTuple):
    """One reason to refuse.

    Attributes:
      about: names of the settings that it reads, first the one that its text begins with. Where it
        reads one setting alone, what it finds makes that one unusable for the rows behind it.
      wrong: what is wrong with what was given, as the text says it; several lines; or nothing.
      text: the line, with its fix. `{wrong}` is what the condition found; the table says what else
        may stand in braces.
    """

    about: str
    wrong: Callable[[Any], Any]
    text: str = "{wrong}"


class Problem(NamedTuple):
    """A line with its fix, and the setting that it begins with."""

    about: str
    text: str


def found_by(
    rows: Iterable[Row],
    given: Any,
    unusable: Collection[str] = (),
    sound: Collection[str] = (),
    **named: Any,
) -> list[Problem]:
    """What rows find, each thing once.

    Args:
      given: what their conditions read.
      unusable: settings that are not known, or whose problems were told elsewhere: no row reads
        them.
      sound: settings that stay usable, whatever rows find.
      named: what may stand in braces of their texts.
    """
    found: dict[Problem, None] = {}
    unusable = set(unusable)
    for row in rows:
        about = row.about.split()
        if not unusable.isdisjoint(about) or not (wrong := row.wrong(given)):
            continue
        several = wrong if isinstance(wrong, list) else [wrong]
        texts = [row.text.format(**named, wrong=each) for each in several]
        found |= dict.fromkeys(Problem(about[0], text) for text in texts)
        if len(about) == 1 and about[0] not in sound:
            unusable.add(about[0])
    return list(found)


# -- checks of single values: each gives a line, or None where the value is fine -----------------


def in_range(
    name: str,
    value: Any,
    low: float,
    high: float,
    *,
    open_low: bool = False,
    open_high: bool = False,
    or_function: bool = False,
) -> str | None:
    """What is wrong with a value that is no number of an interval.

    Arrays and tracers of a number, without axes, pass, since only a Python or NumPy scalar has a
    value when a rule is built. `optax.inject_hyperparams` builds rules with traced arguments.

    Args:
      or_function: whether a function passes, too, as a schedule of learning rates.
    """
    interval = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
    if isinstance(value, Real) and not isinstance(value, bool):
        above = value > low if open_low else value >= low
        below = value < high if open_high else value <= high
        fix = f"is outside {interval}: choose a value inside it"
        return None if above and below else f"{name}={value!r} {fix}"
    kind = getattr(value.dtype, "kind", "O") if getattr(value, "ndim", None) == 0 else "O"
    array = kind not in "bcmMOSU"  # bfloat16 is of kind V
    if array or (or_function and callable(value)):
        return None
    also = " or a function" if or_function else ""
    return f"{name}={value!r}: give a number in {interval}{also}"


def at_least(name: str, value: Any, least: int) -> str | None:
    """What is wrong with a number of things."""
    if is_whole(value) and value >= least:
        return None
    return f"{name}={value!r}: give a whole number of at least {least}"


def each_of(name: str, values: Any, fits: Callable[[Any], bool], fix: str) -> str | None:
    """What is wrong with values, one a region for example, of which `fits` should be true."""
    if isinstance(values, tuple) and all(map(fits, values)):
        return None
    return f"{name}={values!r}: {fix}"


def tuples(values: Any) -> Any:
    """Iterables, but texts and mappings, as tuples, and so what they hold; the rest as it is."""
    holds = isinstance(values, Iterable) and not isinstance(values, str | Mapping | type)
    return tuple(map(tuples, values)) if holds and getattr(values, "ndim", 1) else values


def rates(learning_rate: Any, momentum: Any, schedule: bool = True) -> list[str | None]:
    """What is wrong with an outer learning rate, and with a momentum in [0, 1).

    Args:
      schedule: whether the learning rate may be a function.
    """
    return [
        in_range("learning_rate", learning_rate, 0.0, float("inf"), or_function=schedule),
        in_range("momentum", momentum, 0.0, 1.0, open_high=True),
    ]


# -- the same of a description's fields: a list of no line, or of one -----------------------------


def whole(label: str, value: Any, least: int = 1) -> list[str]:
    """A line unless the value is a whole number of at least `least`."""
    fine = is_whole(value) and value >= least
    return [] if fine else [f"{label} is {value!r}: use a whole number of at least {least}"]


def above_zero(label: str, value: Any, most: float = math.inf) -> list[str]:
    """A line unless the value is a number in (0, most]."""
    if is_number(value) and 0 < value <= most:
        return []
    limit = "" if most == math.inf else f" and at most {most:g}"
    return [f"{label} is {value!r}: use a number above 0{limit}"]


def not_negative(label: str, value: Any) -> list[str]:
    """A line unless the value is a number of 0 or more."""
    fine = is_number(value) and value >= 0
    return [] if fine else [f"{label} is {value!r}: use a number of 0 or more"]


def is_whole(value: Any) -> bool:
    """Whether it is a whole number, Python's or NumPy's; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether it is a finite number, Python's or NumPy's, of a float's range; switches are none."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False
