"""Variants from values of fields: a grid, or seeded random draws from values and ranges."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import ml_collections
import numpy as np

from experiments.cli import closest, override
from experiments.cli import fields as field_names
from lowcomm_jax.refused import collect, refuse

_RANGE = re.compile(r"(log|uniform)\(([^,()]+),([^,()]+)\)")
MOST = 1000  # points; more are taken for a mistake
_RENAME = "leave one out, or rename it; of a value only letters, digits, _, =, + and - are kept"


@dataclasses.dataclass(frozen=True)
class Axis:
    """A field and its values: texts, or a range from `low` to `high`, log or uniform."""

    field: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    def draw(self, rng: np.random.Generator) -> str:
        """A random value as text; from a range with three digits."""
        if self.values:
            return self.values[rng.integers(len(self.values))]
        if self.log:
            return f"{math.exp(rng.uniform(math.log(self.low), math.log(self.high))):.3g}"
        return f"{rng.uniform(self.low, self.high):.3g}"


def parse_axis(text: str) -> Axis:
    """Read `field=1,2,3`, `field=log(1e-4,1e-2)` or `field=uniform(0,1)`.

    Raises:
      ValueError: the text is none of these.
    """
    field, equals, given = (part.strip() for part in text.partition("="))
    if not equals or not field or not given:
        raise ValueError(f"{text!r}: write field=value,value or field=log(low,high)")
    found = _RANGE.fullmatch(given)
    if not found:
        values = tuple(value.strip() for value in given.split(","))
        if not all(values) or len(set(values)) != len(values):
            raise ValueError(f"{text!r}: give every value once, separated by commas")
        return Axis(field, values)
    log, (low, high) = found[1] == "log", map(float, found.groups()[1:])
    if not low < high or (log and low <= 0):
        floor = "0 < low < high" if log else "low < high"
        raise ValueError(f"{text!r}: {floor} is needed")
    return Axis(field, low=low, high=high, log=log)


def parse_axes(vary: Sequence[str]) -> tuple[list[Axis], list[str]]:
    """(the axes that can be read, a line for every text that `parse_axis` does not take)."""
    problems: list[str] = []
    given = [collect(problems, "", functools.partial(parse_axis, text)) for text in vary]
    return [axis for axis in given if axis is not None], problems


def points(
    base: ml_collections.ConfigDict, vary: Sequence[str], draws: int | None, seed: int
) -> dict[str, dict[str, Any]]:
    """Every point by name: what differs from `base`, as nested dicts.

    Args:
      vary: texts of `parse_axis`.
      draws: random points, duplicates among them dropped; None = the whole grid.

    Raises:
      Refused: every problem, a line each.
    """
    axes, problems = parse_axes(vary)
    refuse("cannot vary", problems + _axis_problems(base, axes, draws))
    if draws is None:
        texts = list(itertools.product(*(axis.values for axis in axes)))
    else:
        rng = np.random.default_rng(seed)
        texts = list(dict.fromkeys(tuple(a.draw(rng) for a in axes) for _ in range(draws)))
    labels = _labels([axis.field for axis in axes])
    found = {}
    for values in texts:
        name = "+".join(f"{k}={_plain(v)}" for k, v in zip(labels, values))
        if name in found:
            problems.append(f"two points would be named {name}: {_RENAME}")
        found[name], wrong = _changes(base, [a.field for a in axes], values)
        problems += wrong
    refuse("cannot vary", problems)
    return found


def _axis_problems(base, axes: Sequence[Axis], draws: int | None) -> list[str]:
    known, names = field_names(base), [axis.field for axis in axes]
    found = [] if axes else ["no field is given; name at least one, 'method.period=10,30'"]
    found += [
        f"{name!r} is no field of the config{closest(name, known)}"
        for name in names
        if name not in known
    ]
    found += [f"{name} is given twice" for name in set(names) if names.count(name) > 1]
    found += [line for axis in axes for line in _alike(axis)]
    if draws is None:
        ranges = [axis.field for axis in axes if not axis.values]
        found += [f"{name} is a range: a grid needs values, or set draws" for name in ranges]
        count = math.prod(len(axis.values) for axis in axes)
    else:
        count = draws
    if draws is not None and draws < 1:
        found.append(f"draws={draws}: at least 1 is needed")
    if count > MOST:
        found.append(f"{count} points are more than {MOST}: use fewer values, or draws")
    return found


def _alike(axis: Axis) -> list[str]:
    """A line for values of an axis that would have one name."""
    by_name: dict[str, list[str]] = {}
    for value in axis.values:
        by_name.setdefault(_plain(value), []).append(value)
    return [
        f"{axis.field}: {' and '.join(map(repr, values))} would both be named {name!r}: {_RENAME}"
        for name, values in by_name.items()
        if len(values) > 1
    ]


def _labels(names: Sequence[str]) -> list[str]:
    """The shortest ends of the field names that differ from one another."""
    for depth in range(1, 1 + max(name.count(".") + 1 for name in names)):
        short = ["_".join(name.split(".")[-depth:]) for name in names]
        if len(set(short)) == len(short):
            return short
    raise AssertionError("unreachable: whole names differ")


def _plain(text: str) -> str:
    """A value as part of a folder's name; keys of a config cannot hold dots."""
    return re.sub(r"[^\w+=-]", "_", text)


def _changes(
    base: ml_collections.ConfigDict, names: Sequence[str], texts: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """One point as nested dicts, its values of the fields' own types, and what is wrong."""
    config = ml_collections.ConfigDict(base)  # a copy; `override` checks types
    problems = [override(config, *pair) for pair in zip(names, texts)]
    changes: dict[str, Any] = {}
    for name in names:
        *parents, last = name.split(".")
        here: Any = changes
        value: Any = config
        for parent in parents:
            here, value = here.setdefault(parent, {}), value[parent]
        here[last] = value[last]
    return changes, [line.removeprefix("--config.") for line in problems if line]
