"""`ExchangeContext`: the parts that all exchanges of one region share; made in `connect`.

`FaultHooks` is the interface through which an experiment delays or damages payloads on purpose.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping
from typing import Protocol

from lowcomm_jax.store.background import Background
from lowcomm_jax.store.commits import CommitLog
from lowcomm_jax.store.heartbeat import Heartbeat
from lowcomm_jax.store.kv import MetricsCounter, Store
from lowcomm_jax.store.slots import Slots
from lowcomm_jax.store.terms import Heal
from lowcomm_jax.store.timing import Pace, Timing
from lowcomm_jax.store.transport import Transport
from lowcomm_jax.store.wait_list import WaitList


@dataclasses.dataclass(frozen=True)
class ContextParts:
    """What the exchanges of one region share, and their transport may use, too.

    Attributes:
      run_id: names the run.
      region: number of this one, from 0.
      count: number of regions.
      timing: how long regions wait for one another.
      pace: deadlines, from observed delays.
      heal: which anchor is kept where anchors differ.
      identity: what else all jobs of the run have in common, for people to read.
      serials: numbers of the files that this job makes.
      counter: counts bytes, rejected records and outages.
      store: the shared keys.
      slots: signed records in the store.
      commit_log: announcements and commit records.
      heartbeat: which regions are alive.
      wait_list: which of them an exchange waits for.
      background: owns the threads of exchanges.
      fault_hooks: called where a test or an experiment may inject faults.
      closing: set when this region leaves.
      halted: set when its exchanges end without an outcome.
    """

    run_id: str
    region: int
    count: int
    timing: Timing
    heal: Heal
    identity: dict[str, str]
    serials: Iterator[int]
    counter: MetricsCounter
    store: Store
    slots: Slots
    commit_log: CommitLog
    heartbeat: Heartbeat
    wait_list: WaitList
    pace: Pace
    background: Background
    fault_hooks: FaultHooks
    closing: threading.Event
    halted: threading.Event


@dataclasses.dataclass(frozen=True)
class ExchangeContext(ContextParts):
    """The parts of one region's exchanges, with the `transport` that moves their payloads."""

    transport: Transport


class FaultHooks(Protocol):
    """Called on the threads of an exchange, which wait for the hook; training goes on."""

    def begins(self, key: str, terms: Mapping[str, int | str]) -> None:
        """An exchange begins; one that follows from it has a key "KEY/...", and no terms."""
        ...

    def sent(self, key: str, data: bytes) -> bytes:
        """Returns the bytes to publish in place of this region's payload."""
        ...

    def received(self, key: str, nbytes: int) -> None:
        """A payload of another region has arrived."""
        ...


class NoFaults:
    """`FaultHooks` that change nothing."""

    def begins(self, key: str, terms: Mapping[str, int | str]) -> None:
        """Does nothing."""

    def sent(self, key: str, data: bytes) -> bytes:
        """Returns `data`."""
        del key
        return data

    def received(self, key: str, nbytes: int) -> None:
        """Does nothing."""
