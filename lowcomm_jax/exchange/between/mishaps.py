"""What goes wrong on purpose: a run is tried out under faults before it must stand them."""

from __future__ import annotations

from typing import Protocol


class Mishaps(Protocol):
    """Called on the threads of an exchange, which wait meanwhile; training goes on."""

    def sent(self, key: str, data: bytes) -> bytes:
        """What is published in the place of this payload of ours."""

    def received(self, key: str, nbytes: int) -> None:
        """A payload of another region has come."""


class NoMishaps:
    """Nothing goes wrong but by itself."""

    def sent(self, key: str, data: bytes) -> bytes:
        """As it is."""
        del key
        return data

    def received(self, key: str, nbytes: int) -> None:
        """At once."""
