"""A region's place in a run: coming in, being known to the others, pausing and leaving."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable

from lowcomm_jax.exchange.between import joining
from lowcomm_jax.exchange.between.gathering import Gathering
from lowcomm_jax.exchange.between.halves import Halves
from lowcomm_jax.exchange.between.litter import Litter
from lowcomm_jax.exchange.between.office import Office
from lowcomm_jax.exchange.between.states import States
from lowcomm_jax.exchange.between.vouching import Vouching
from lowcomm_jax.exchange.between.waiting import Waiting


class Membership:
    """The part of a `RemoteExchange` that is about regions, not about what they exchange.

    Attributes:
      region: which one we are; count: how many there are.
    """

    def __init__(self, office: Office, kind: str, keep: int):
        self.region, self.count = office.region, office.count
        self._office, self._kind = office, kind
        self._litter = Litter(office, keep)
        self._waiting = Waiting(office.beats)
        self._states = States(office, self._waiting)
        self._vouching = Vouching(office, self._states)
        self._running: list[Gathering | Halves] = []

    def join(self, wait_s: float, step: int = 0) -> None:
        """Register, begin to beat, and wait until all regions of a new run are there.

        Into a run that goes on a region comes at once. One that was begun and has nobody left
        begins anew, with all regions or after `wait_s` with those who are there: keys can then be
        used again. Who is behind the furthest of them comes into their run as a latecomer.

        Args:
          step: up to which all is done that was due in the state that this region brings with it.

        Raises:
          ValueError: the run stands there under another secret or with other settings.
          TimeoutError: not all regions of a new run came in time, or only fresh ones came back.
          StoreUnavailable: the store does not answer all that time.
        """
        atexit.register(self._end)
        office, until = self._office, time.monotonic() + wait_s
        joining.insist(office, until, lambda: joining.register(office, self._kind))
        joining.insist(office, until, self._litter.adopt)
        self._waiting.roster = joining.enter(office, until, step)

    @property
    def awaited(self) -> bool:
        """Whether the others wait for this region's payloads; not when it comes into their run."""
        return self._office.beats.own.awaited

    def come_in(self) -> None:
        """Let the others wait for our payloads, before the first one; returns when they know."""
        self._office.beats.update(awaited=True, wants=False)
        self.hear(times=2)

    def hear(self, times: int = 1) -> None:
        """See `Beats.hear`: then the others have told anew where they are."""
        self._office.beats.hear(times)

    def living(self) -> set[int]:
        """Regions whose heartbeat was seen lately, this one included."""
        return self._office.beats.living()

    def steps(self) -> dict[int, int]:
        """Inner steps that the living regions have made, as they told."""
        latest = self._office.beats.latest()
        return {r: max(latest[r].step, latest[r].trained) for r in sorted(self.living())}

    def beat(self, step: int, trained: int = 0) -> None:
        """Tell the others, with the next heartbeat, after which step we have sent or landed
        something, and how many we have made, if more."""
        self._office.beats.update(step=step, trained=trained, at_once=False)

    def trains(self, step: int) -> None:
        """Tell the others how many inner steps we have made, with the next heartbeat."""
        self._office.beats.update(trained=step, at_once=False)

    def agree(self, name: str, proposal: dict) -> dict:
        """What the first region proposed, small JSON, since all have begun together.

        Raises:
          StoreUnavailable: try again later.
        """
        return self._office.board.agree(f"{self._office.beats.own.epoch}/{name}", proposal)

    def counts(self) -> dict[str, int]:
        """Since the start: "sent", "received" (payload bytes), "store_written", "store_read" (all
        bytes through the store), "rejected_record", "rejected_damaged", "rejected_content",
        "rejected_state", "outage"; what never happened is absent.
        """
        return self._office.tally.read()

    def pause(self, linger_s: float = 30.0) -> None:
        """End the exchanges under way without an outcome, before all regions stop for a while.

        Nothing is committed without a region that only stops: what is under way is started again
        when the run continues. Payloads can be had until all living regions pause, `linger_s` at
        most.
        """
        beats = self._office.beats
        self._office.halted.set()
        for gathering in self._running:
            gathering.join()
        beats.update(paused=True)
        self._linger(linger_s, lambda: all(beats.latest()[r].paused for r in self.living()))

    def fail(self, error: Exception) -> None:
        """Let this be raised by whatever waits here, and by what is called from now on."""
        self._office.halted.set()  # nothing can be awaited of us any more
        self._office.beats.fail(error)

    def close(self, linger_s: float = 30.0) -> None:
        """Leave the run and end all exchanges under way.

        Where others can only get payloads while this region is there, it stays until all living
        ones have them, `linger_s` at most.
        """
        if self._office.transport.lingers and not self._office.halted.is_set():
            self._linger(linger_s, self._litter.all_have_ours)
        self._end()

    def _linger(self, seconds: float, done: Callable[[], bool]) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not done():
            time.sleep(self._office.timing.beat_s / 4)

    def _end(self) -> None:
        """Stop all threads: one inside a library when the process ends would bring it down."""
        atexit.unregister(self._end)
        office = self._office
        office.closing.set()
        for gathering in self._running:
            gathering.join()
        self._states.join()
        self._vouching.join()
        office.beats.stop()
        office.transport.close()
        self._running = []
