"""Checks that data of a file has the fields and types that its reader needs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.cli import RefusedError

Check = Callable[[Any], str | None]
"""Says what is wrong with a value, or None: `lacks a field x`, `is no list`, `x is no text`."""


def _is(what: str, test: Callable[[Any], bool]) -> Check:
    return lambda value: None if test(value) else f"is {what}"


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


text = _is("no text", lambda x: isinstance(x, str))
number = _is("no finite number", _number)
positive = _is("no positive number", lambda x: _number(x) and x > 0)
whole = _is("no whole number", lambda x: isinstance(x, int) and not isinstance(x, bool))
count = _is("no whole number above 0", lambda x: whole(x) is None and x > 0)
section = _is("no section", lambda x: isinstance(x, Mapping))
items = _is("no list", lambda x: isinstance(x, list))


def or_none(check: Check) -> Check:
    """`check`, or null."""
    return lambda value: None if value is None else check(value)


def list_of(check: Check) -> Check:
    """A list whose entries all pass `check`."""

    def checked(value: Any) -> str | None:
        if not isinstance(value, list):
            return "is no list"
        wrong = ((place, check(entry)) for place, entry in enumerate(value))
        return next((f"entry {place} {reason}" for place, reason in wrong if reason), None)

    return checked


def fields(shape: Mapping[str, Check]) -> Check:
    """A section that has at least these fields."""

    def checked(value: Any) -> str | None:
        if not isinstance(value, Mapping):
            return "is no section"
        for name, check in shape.items():
            if name not in value:
                return f"lacks {name}"
            if (wrong := check(value[name])) is not None:
                return f"{name} {wrong}"
        return None

    return checked


def values_of(check: Check) -> Check:
    """A section whose values all pass `check`, whatever their names."""

    def checked(value: Any) -> str | None:
        if not isinstance(value, Mapping):
            return "is no section"
        wrong = ((name, check(entry)) for name, entry in value.items())
        return next((f"{name} {reason}" for name, reason in wrong if reason), None)

    return checked


def read_json(path: Path, title: str, fix: str) -> Any:
    """The content of a JSON file.

    Raises:
      RefusedError: it cannot be read, or is no JSON; one line, which ends with `fix`.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror
    except UnicodeDecodeError:
        reason = "no text in UTF-8"
    except RecursionError:
        reason = "nested too deeply"
    except ValueError as error:
        reason = f"no JSON ({error})"
    raise RefusedError([f"{path}: {reason}; {fix}"], title)
