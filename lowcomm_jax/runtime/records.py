"""Reads plain JSON of a given shape, or raises `Rejected`.

Records come from the store. With a secret their writer knows the run's secret; without one anybody
may be the writer. Either may be a program of another version. A valid signature therefore says
nothing about the content, and a record that does not fit must end no thread of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lowcomm_jax.runtime.errors import Rejected

T = TypeVar("T")
Read = Callable[[Any], T]


def whole(value: Any) -> int:
    """A whole number that fits 64 bits."""
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise Rejected("no whole number of 64 bits")
    return value


def size(value: Any) -> int:
    """A number of bytes, or of entries along an axis."""
    if whole(value) < 0:
        raise Rejected("a negative size")
    return value


def flag(value: Any) -> bool:
    """True or false."""
    if type(value) is not bool:
        raise Rejected("neither true nor false")
    return value


def text(value: Any) -> str:
    """A string."""
    if type(value) is not str:
        raise Rejected("no text")
    return value


def section(value: Any) -> dict:
    """A JSON object."""
    if type(value) is not dict:
        raise Rejected("no section")
    return value


def fields(value: Any, **reads: Read) -> dict[str, Any]:
    """An object with these fields and no others, each read."""
    found = section(value)
    if found.keys() != reads.keys():
        raise Rejected("a section of other fields")
    return {name: read(found[name]) for name, read in reads.items()}


def listed(read: Read[T]) -> Read[list[T]]:
    """Read a list whose entries `read` takes."""

    def of(value: Any) -> list[T]:
        if type(value) is not list:
            raise Rejected("no list")
        return [read(one) for one in value]

    return of


def or_none(read: Read[T]) -> Read[T | None]:
    """Read null as None, and anything else by `read`."""
    return lambda value: None if value is None else read(value)


def by_name(read: Read[T]) -> Read[dict[str, T]]:
    """Read an object whose values `read` takes."""
    return lambda value: {name: read(one) for name, one in section(value).items()}


def by_region(read: Read[T]) -> Read[dict[int, T]]:
    """Read an object whose names are numbers of regions, and whose values `read` takes."""

    def of(value: Any) -> dict[int, T]:
        if not all(name.isascii() and name.isdecimal() for name in section(value)):
            raise Rejected("no number of a region")
        return {whole(int(name[:20])): read(one) for name, one in value.items()}

    return of


def terms(value: Any) -> dict[str, int | str]:
    """What a region has decided (`runtime.terms`)."""
    return by_name(lambda x: x if type(x) is str else whole(x))(value)


def arrays(piece: Read) -> Read[dict[str, tuple[str, tuple[int, ...], list]]]:
    """Descriptions of arrays by name: dtype, shape, and the pieces that hold their bytes."""

    def one(value: Any) -> tuple[str, tuple[int, ...], list]:
        if type(value) is not list or len(value) != 3:
            raise Rejected("no description of an array")
        dtype, shape, pieces = value
        return text(dtype), tuple(listed(size)(shape)), listed(piece)(pieces)

    return by_name(one)


def row(*reads: Read) -> Read[tuple]:
    """Read a list of as many values as there are `reads`, each by its own."""

    def of(value: Any) -> tuple:
        if type(value) is not list or len(value) != len(reads):
            raise Rejected(f"no list of {len(reads)}")
        return tuple(read(one) for read, one in zip(reads, value))

    return of


def picked(value: Any, **reads: Read) -> Mapping[str, Any]:
    """These fields of an object, each read; the object may have others, which are dropped."""
    found = section(value)
    if not reads.keys() <= found.keys():
        raise Rejected("a section that lacks fields")
    return {name: read(found[name]) for name, read in reads.items()}
