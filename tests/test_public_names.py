"""The names that users call, frozen: none is lost, and no signature changes.

`public_names.txt` beside this file has one line a name, `room.name(parameters)`, and in the rooms
that `lc` hands out one a public method of a class. Names may be added, and so may parameters with
a default, behind those that are there.
`python tests/test_public_names.py --write` rewrites the
list: a change of it is a breaking change, to be named in the CHANGELOG.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import types
from pathlib import Path

import lowcomm_jax

FROZEN = Path(__file__).with_name("public_names.txt")
ROOMS = (
    "lowcomm_jax",
    "lowcomm_jax.methods",
    "lowcomm_jax.outer",
    "lowcomm_jax.landing",
    "lowcomm_jax.merge",
    "lowcomm_jax.batching",
    "lowcomm_jax.topology",
    "lowcomm_jax.roles",
    "lowcomm_jax.exchange",
    "lowcomm_jax.compression",
    "lowcomm_jax.schedule",
    "lowcomm_jax.channels",
    "lowcomm_jax.checkpoint",
    "lowcomm_jax.models",
    "lowcomm_jax.data",
    "lowcomm_jax.network",
    "lowcomm_jax.consensus",
)
# Of classes in these rooms the methods are frozen, too; of others the constructors.
WITH_METHODS = (
    "lowcomm_jax",
    "lowcomm_jax.batching",
    "lowcomm_jax.checkpoint",
    "lowcomm_jax.topology",
    "lowcomm_jax.roles",
)
# What programs call of a room that offers more to the others.
NAMED = {
    "lowcomm_jax.topology": ("Gossip",),
    "lowcomm_jax.roles": ("RegionRoles", "Rows", "Shares"),
}


def _default(value: object) -> str:
    """A default as text that is the same in every run."""
    if value is None or isinstance(value, bool | int | float | str | tuple):
        return repr(value)
    return getattr(value, "__name__", type(value).__name__)


def _parameters(thing: object) -> str:
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return ""
    parts, starred = [], False
    for one in signature.parameters.values():
        if one.kind is one.KEYWORD_ONLY and not starred:
            parts.append("*")
        starred |= one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
        mark = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        default = "" if one.default is one.empty else f"={_default(one.default)}"
        parts.append(f"{mark}{one.name}{default}")
    return f"({', '.join(parts)})"


def _lines(name: str, thing: object, methods: bool = False) -> list[str]:
    if inspect.ismodule(thing) or not callable(thing):
        return [name]
    lines = [name + _parameters(thing)]
    if methods and inspect.isclass(thing) and not issubclass(thing, BaseException | tuple):
        for key, value in sorted(vars(thing).items()):
            if key.startswith("_"):
                continue
            if isinstance(value, classmethod | staticmethod):
                value = value.__func__
            lines.append(f"{name}.{key}" + (_parameters(value) if callable(value) else ""))
    return lines


def _room(room: str) -> types.ModuleType:
    """The module that programs reach by this name."""
    handed_out = getattr(lowcomm_jax, room.rpartition(".")[2], None)
    return handed_out or importlib.import_module(room)


def _offered(room: str) -> dict[str, object]:
    module = _room(room)
    names = NAMED.get(room) or module.__all__
    return {name: getattr(module, name) for name in names}


def offered_names() -> dict[str, object]:
    """All public names with the modules that offer them, and what they stand for."""
    return {
        f"{_room(room).__name__}.{name}": thing
        for room in ROOMS
        for name, thing in _offered(room).items()
    }


def public_names() -> list[str]:
    """One line a public name, sorted by room and name."""
    lines = []
    for room in ROOMS:
        for name, thing in sorted(_offered(room).items()):
            lines += _lines(f"{room}.{name}", thing, room in WITH_METHODS)
    return lines


def _extends(old: str, new: str) -> bool:
    """Whether a signature is the old one, or has more parameters with a default behind it."""
    start = old.removesuffix(")")
    behind = new.removeprefix(start).removesuffix(")")
    return new.startswith(start) and re.fullmatch(r"(, (\*|\w+=\S.*))*", behind) is not None


def test_no_public_name_is_lost_or_changed():
    frozen, now = FROZEN.read_text(encoding="utf-8").splitlines(), public_names()
    by_name = {re.split(r"\(", line)[0]: line for line in now}
    wrong = [
        f"{line}  ->  {by_name.get(line.partition('(')[0], 'gone')}"
        for line in frozen
        if not _extends(line, by_name.get(line.partition("(")[0], "gone"))
    ]
    assert not wrong, "public names that are gone or changed:\n" + "\n".join(wrong)


def test_a_changed_signature_is_noticed():
    def factory(period, *, outer=None):
        """Stands for one of the library."""

    assert _lines("room.factory", factory) == ["room.factory(period, *, outer=None)"]
    old = "factory(period, outer=None)"
    assert _extends(old, old) and _extends(
        old, "factory(period, outer=None, merge=None, *, k=(1, 2))"
    )
    for changed in ("gone", "factory(period)", "factory(outer=None, period)"):
        assert not _extends(old, changed)
    assert not _extends(old, "factory(period, outer=None, needed)")


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    FROZEN.write_text("\n".join(public_names()) + "\n", encoding="utf-8")
