"""What all exchanges of a region share."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from typing import Protocol

from lowcomm_jax.runtime.commits import CommitLog
from lowcomm_jax.runtime.heartbeat import Heartbeat
from lowcomm_jax.runtime.kv import MetricsCounter, Store
from lowcomm_jax.runtime.secret import Seal
from lowcomm_jax.runtime.terms import Heal
from lowcomm_jax.runtime.timing import Pace, Timing
from lowcomm_jax.runtime.transport import Transport

# -- mishaps -----------------------------------------------------------------------------------
#
# What goes wrong on purpose: a run is tried out under faults before it must stand them.


class FaultHooks(Protocol):
    """Called on the threads of an exchange, which wait meanwhile; training goes on."""

    def begins(self, key: str, terms: Mapping[str, int | str]) -> None:
        """An exchange begins; one that follows from it has a key "KEY/...", and no terms."""

    def sent(self, key: str, data: bytes) -> bytes:
        """What is published in the place of this payload of ours."""

    def received(self, key: str, nbytes: int) -> None:
        """A payload of another region has come."""


class NoFaults:
    """Nothing goes wrong but by itself."""

    def begins(self, key: str, terms: Mapping[str, int | str]) -> None:
        """As it must."""

    def sent(self, key: str, data: bytes) -> bytes:
        """As it is."""
        del key
        return data

    def received(self, key: str, nbytes: int) -> None:
        """At once."""


@dataclasses.dataclass(frozen=True)
class ExchangeContext:
    """The parts of one region's exchange; `halted` ends its exchanges, `closing` everything."""

    run_id: str
    region: int
    count: int
    timing: Timing
    heal: Heal
    tally: MetricsCounter
    store: Store
    seal: Seal
    board: CommitLog
    beats: Heartbeat
    transport: Transport
    pace: Pace
    mishaps: FaultHooks
    closing: threading.Event
    halted: threading.Event
