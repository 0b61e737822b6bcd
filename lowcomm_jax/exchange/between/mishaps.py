"""What goes wrong on purpose: a run is tried out under faults before it must stand them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Mishaps(Protocol):
    """Called on the threads of an exchange, which wait meanwhile; training goes on."""

    def begins(self, key: str, terms: Mapping[str, int | str]) -> None:
        """An exchange begins; one that follows from it has a key "KEY/...", and no terms."""

    def sent(self, key: str, data: bytes) -> bytes:
        """What is published in the place of this payload of ours."""

    def received(self, key: str, nbytes: int) -> None:
        """A payload of another region has come."""


class NoMishaps:
    """Nothing goes wrong but by itself."""

    def begins(self, key: str, terms: Mapping[str, int | str]) -> None:
        """As it must."""

    def sent(self, key: str, data: bytes) -> bytes:
        """As it is."""
        del key
        return data

    def received(self, key: str, nbytes: int) -> None:
        """At once."""
