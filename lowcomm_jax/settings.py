"""What a field of a record says of itself: its type, its values, what it is, its default.

A record is a frozen dataclass whose fields are `Annotated` with a sentence, and with `Takes` where
their values are bounded. Help, configs, docstrings and refusals read fields as data
(`settings_of`), so that a field is described where its default stands.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import textwrap
import typing
from collections.abc import Callable, Collection, Hashable, Sequence
from numbers import Real
from typing import Any, Literal, TypeVar

import numpy as np

from lowcomm_jax.refused import Problem, is_whole

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Takes:
    """The values that a field may have, whatever the others are.

    Attributes:
      fits: whether a value is one.
      fix: what to do else, or a function of the value that says so.
    """

    fits: Callable[[Any], bool]
    fix: str | Callable[[Any], str]

    def problem(self, name: str, value: Any) -> str | None:
        """A line with its fix, or None."""
        return None if self.fits(value) else f"{name}={value!r}: {self.fix_of(value)}"

    def fix_of(self, value: Any) -> str:
        """What to do about a value that is none of these."""
        return self.fix if isinstance(self.fix, str) else self.fix(value)


def _of_numbers(fix: str) -> Callable[[Any], str]:
    """The fix of what takes numbers; arrays of one are told apart."""

    def of(x: Any) -> str:
        array = getattr(x, "ndim", None) == 0 and not isinstance(x, np.generic)
        return "an array; give its number, value.item()" if array else fix

    return of


SWITCH = Takes(lambda x: isinstance(x, bool | np.bool_), "use True or False")
PREFIXES = Takes(
    lambda x: isinstance(x, Sequence) and all(isinstance(each, str) for each in x),
    "give path prefixes of leaves, as ('blocks',)",
)
FROM_1 = Takes(lambda x: is_whole(x) and x >= 1, _of_numbers("give a whole number of at least 1"))


def number(fits: Callable[[Any], bool], fix: str, optional: bool = False) -> Takes:
    """Numbers, Python's or NumPy's, of which `fits` is true; True and False are none.

    Args:
      optional: whether None is taken, too.
    """

    def fits_all(x: Any) -> bool:
        if x is None:
            return optional
        return isinstance(x, Real) and not isinstance(x, bool) and fits(x)

    return Takes(fits_all, _of_numbers(fix))


def one_of(*known: Any) -> Takes:
    """One of these texts or numbers."""

    def fix(x: Any) -> str:
        names = [str(each) for each in known]
        near = difflib.get_close_matches(str(x), names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"choose one of {', '.join(names)}{hint}"

    # Arrays cannot be hashed, and `in` would compare each of their elements.
    return Takes(lambda x: isinstance(x, Hashable) and x in known, fix)


@dataclasses.dataclass(frozen=True)
class InConfig:
    """Marks a setting that a training config has, and that an engine takes as it is there.

    Attributes:
      decides: what it decides. `learnt`: what is learnt, so that it stays when a run continues.
        `place`: where and how a run computes; with others it learns the same, up to rounding.
        `beside`: what is measured beside the training.
      section: of the config that has it; None = none, it is a field of its own.
    """

    decides: Literal["learnt", "place", "beside"]
    section: str | None = None


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a field of a record says of itself.

    Attributes:
      about: the setting in a sentence.
      takes: its values; None = any, or other settings decide.
      in_config: what it is in a config; None = not marked: it is no field of a config, or one of a
        section that has the whole record.
      default: where there is none, `dataclasses.MISSING`.
      kind: type of its values.
    """

    about: str
    takes: Takes | None
    in_config: InConfig | None
    default: Any
    kind: Any


@functools.cache
def settings_of(record: type[Any]) -> dict[str, Setting]:
    """What each field of a record says of itself, by name, in order.

    A field that is a `Literal` takes its values, without a `Takes`. Fields without a sentence, as a
    class of one's own may add, are left out. Where annotations are texts (`from __future__ import
    annotations`), a lambda inside one does not find names of its module: define it outside.
    """
    hints, found = typing.get_type_hints(record, include_extras=True), {}
    for field in dataclasses.fields(record):
        if typing.get_origin(hints[field.name]) is not typing.Annotated:
            continue
        kind, *says = typing.get_args(hints[field.name])
        (about,) = (each for each in says if isinstance(each, str))
        takes = next((each for each in says if isinstance(each, Takes)), None)
        takes = _of_literal(kind) or takes
        in_config = next((each for each in says if isinstance(each, InConfig)), None)
        found[field.name] = Setting(about, takes, in_config, field.default, kind)
    return found


def config_fields(record: type[Any]) -> dict[str, str]:
    """Name of each setting that is marked `InConfig` -> dotted name of its field in a config."""
    marks = {name: setting.in_config for name, setting in settings_of(record).items()}
    return {
        name: name if mark.section is None else f"{mark.section}.{name}"
        for name, mark in marks.items()
        if mark is not None
    }


def misfits(settings: Any, unknown: Collection[str] = ()) -> list[Problem]:
    """The fields of a record whose values are none that they take.

    Args:
      unknown: fields that are not looked at.
    """
    found = {
        name: setting.takes.problem(name, getattr(settings, name))
        for name, setting in settings_of(type(settings)).items()
        if name not in unknown and setting.takes is not None
    }
    return [Problem(name, line) for name, line in found.items() if line is not None]


def choices(kind: type, settings: Any) -> list[str | None]:
    """What is wrong with the fields that a dataclass `kind` types as a `Literal`.

    Args:
      settings: of this class or of one that is made of it, whose own fields are not looked at.
    """
    typed = {name: _of_literal(hint) for name, hint in typing.get_type_hints(kind).items()}
    given = {name: takes for name, takes in typed.items() if takes is not None}
    return [takes.problem(name, getattr(settings, name)) for name, takes in given.items()]


def _of_literal(hint: Any) -> Takes | None:
    """The values of a `Literal`; None for another type."""
    return one_of(*typing.get_args(hint)) if typing.get_origin(hint) is Literal else None


def with_settings(docstring: str | None, record: type[Any], heading: str = "Args") -> str:
    """A class's docstring, with every setting of a record behind its first line."""
    lines = [f"    {heading}:"]
    for name, setting in settings_of(record).items():
        about = f"{name}: {setting.about}"
        lines += textwrap.wrap(about, 100, initial_indent=" " * 6, subsequent_indent=" " * 8)
    first, _, rest = (docstring or "").partition("\n")
    return "\n".join([first, "", *lines, rest])


def described(record: type[T]) -> type[T]:
    """Put every field into the docstring of a record; a decorator."""
    record.__doc__ = with_settings(record.__doc__, record, "Attributes")
    return record
