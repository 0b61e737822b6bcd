"""`ExchangeContext`: the parts that all exchanges of one region share; made in `connect`.

A class that inherits `FaultHooks` delays or damages payloads on purpose.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from lowcomm_jax.store.background import Background
from lowcomm_jax.store.commits import CommitLog
from lowcomm_jax.store.errors import StoreUnavailable
from lowcomm_jax.store.heartbeat import Heartbeat
from lowcomm_jax.store.kv import MetricsCounter, Store
from lowcomm_jax.store.secret import Seal
from lowcomm_jax.store.slots import Slots
from lowcomm_jax.store.terms import Heal
from lowcomm_jax.store.timing import Pace, Timing
from lowcomm_jax.store.transport import Transport
from lowcomm_jax.store.wait_list import WaitList

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class ExchangeContext:
    """What the exchanges of one region share.

    Attributes:
      url: of the store.
      run_id: names the run.
      region: number of this one, from 0.
      count: number of regions.
      timing: how long regions wait for one another.
      heal: which anchor is kept where anchors differ.
      identity: what else all jobs of the run have in common, for people to read.
      fault_hooks: called where a test or an experiment may inject faults.
      serials: numbers of the files that this job makes.
      counter: counts bytes, rejected records and outages.
      store: the shared keys.
      slots: signed records in the store.
      commit_log: announcements and commit records.
      heartbeat: which regions are alive.
      wait_list: which of them an exchange waits for.
      pace: deadlines, from observed delays.
      background: owns the threads of exchanges.
      closing: set when this region leaves.
      halted: set when its exchanges end without an outcome.
      transport: moves payloads; `make_transport` makes it last, from all the others.

    Raises:
      StoreUnavailable: the store cannot be opened; and what `make_transport` raises.
    """

    url: str
    run_id: str
    region: int
    count: int
    timing: Timing
    heal: Heal
    identity: dict[str, str]
    fault_hooks: FaultHooks
    secret: dataclasses.InitVar[bytes]
    make_transport: dataclasses.InitVar[Callable[[ExchangeContext], Transport]]

    def __post_init__(
        self, secret: bytes, make_transport: Callable[[ExchangeContext], Transport]
    ) -> None:
        self.serials: Iterator[int] = itertools.count(1)
        self.counter: MetricsCounter = MetricsCounter()
        self.store: Store = Store(self.url, self.run_id, self.counter)
        self.slots: Slots = Slots(self.store, Seal(self.run_id, secret))
        self.commit_log: CommitLog = CommitLog(self.store, self.slots)
        self.heartbeat: Heartbeat = Heartbeat(
            self.store, self.slots, self.region, self.count, self.timing
        )
        self.wait_list: WaitList = WaitList(self.heartbeat)
        self.pace: Pace = Pace(self.timing)
        self.background: Background = Background(self.heartbeat.fail)
        self.closing: threading.Event = threading.Event()
        self.halted: threading.Event = threading.Event()
        self.transport: Transport = make_transport(self)


def check_open(context: ExchangeContext, what: str) -> None:
    """Return if exchanges go on.

    Args:
      what: is not done yet, for the message.

    Raises:
      RuntimeError: they close, or halt; and what `Heartbeat.check` raises.
    """
    context.heartbeat.check()
    if context.closing.is_set() or context.halted.is_set():
        raise RuntimeError(f"{what} was not finished when the exchange closed or paused")


def until_answered(
    context: ExchangeContext, what: str, act: Callable[[], T], until: float = math.inf
) -> T:
    """Call `act` until the store answers, and return its result.

    Raises:
      StoreUnavailable: the store did not answer until then, by `time.monotonic`.
      RuntimeError: see `check_open`.
    """
    told = False
    for pause in context.store.pauses():
        check_open(context, what)
        try:
            return act()
        except StoreUnavailable as error:
            left = until - time.monotonic()
            if left <= 0:
                raise
            if not told:  # where nothing limits the wait, the heartbeat reports the outage
                ever = left == math.inf
                limit = "until it answers" if ever else f"for another {left:.0f} s"
                level = logging.INFO if ever else logging.WARNING
                log.log(level, "%s: %s; it is tried %s", what, error, limit)
            told = True
            context.closing.wait(min(left, pause))
    raise AssertionError("pauses never end")


def keep_looking(
    what: str,
    look: Callable[[], bool],
    over: Callable[[], bool],
    news: threading.Event,
    pauses: Callable[[], Iterator[float]],
) -> None:
    """Look again and again until it is over: this is how rounds wait.

    Where the store does not answer, it looks again; the heartbeat reports an outage, and deadlines
    stand still meanwhile.

    Args:
      what: is looked for, for the log.
      look: one pass; returns whether anything is new, after which the next one follows soon.
      over: whether to stop; asked after every pass, and may raise.
      news: set where the next pass should not wait for its time.
      pauses: seconds from one pass to the next, while nothing is new.
    """
    waits = pauses()
    while not over():
        try:
            if look():
                # The others are about as far as we are: what we wait for next is not far.
                waits = pauses()
        except StoreUnavailable as error:
            log.info("%s: %s", what, error)
        if over():
            return
        news.wait(next(waits))
        news.clear()


class FaultHooks:
    """Called on the threads of an exchange, which wait for the hook; training goes on.

    These change nothing.
    """

    def begins(self, key: str, terms: Mapping[str, int | str]) -> None:
        """An exchange begins; one that follows from it has a key "KEY/...", and no terms."""

    def sent(self, key: str, data: bytes) -> bytes:
        """Returns the bytes to publish in place of this region's payload."""
        del key
        return data

    def received(self, key: str, nbytes: int) -> None:
        """A payload of another region has arrived."""
