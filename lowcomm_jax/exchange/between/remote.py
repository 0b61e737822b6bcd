"""Exchange between independent jobs, one per region: nothing is shared but a key-value store.

An exchange of a key goes: publish our payload; announce it; fetch what others announce; agree on
who took part by one create-only commit record; have all that it names. Payloads that are reduced in
slices go through that twice (`halves`). All on threads; bytes are authenticated, not encrypted.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from lowcomm_jax.exchange.between import joining
from lowcomm_jax.exchange.between.arrived import Arrived, arrange
from lowcomm_jax.exchange.between.commits import name_of
from lowcomm_jax.exchange.between.gathering import Gathering
from lowcomm_jax.exchange.between.halves import Halves, stands
from lowcomm_jax.exchange.between.litter import Litter
from lowcomm_jax.exchange.between.office import Office
from lowcomm_jax.exchange.between.request import Request, problems
from lowcomm_jax.exchange.between.slices import Reduction
from lowcomm_jax.exchange.between.states import State, States
from lowcomm_jax.exchange.between.waiting import Waiting


class RemoteExchange:
    """One region's side of the exchange; made by `exchange.store` and `exchange.peers`.

    Attributes:
      region: which one we are; count: how many there are; heal: see `exchange.store`.

    Methods may be called from one thread; most raise `Superseded` when the place is taken, and
    `Lost` when the others have begun the run anew.
    """

    def __init__(self, office: Office, kind: str, keep: int):
        self.region, self.count, self.heal = office.region, office.count, office.heal
        self._office, self._kind = office, kind
        self._litter = Litter(office, keep)
        self._states = States(office)
        self._open: dict[str, Gathering | Halves] = {}
        self._running: list[Gathering | Halves] = []
        self._waiting = Waiting(office.beats)

    # -- membership ---------------------------------------------------------------------------

    def join(self, wait_s: float, step: int = 0) -> None:
        """Register, begin to beat, and wait until all regions of a new run are there.

        Into a run that goes on a region comes at once. One that was begun and has nobody left
        begins anew, with all regions or after `wait_s` with those who are there: keys can then be
        used again. Who is behind the furthest of them comes into their run as a latecomer.

        Args:
          step: inner steps of the state that this region brings with it.

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
        """Inner steps of the living regions, as they told."""
        latest = self._office.beats.latest()
        return {region: latest[region].step for region in sorted(self.living())}

    def beat(self, step: int) -> None:
        """Tell the others our step, with the next heartbeat."""
        self._office.beats.update(step=step, at_once=False)

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
        office.beats.stop()
        office.transport.close()
        self._running = []

    # -- exchanges ----------------------------------------------------------------------------

    def start(
        self,
        key: str,
        arrays: dict[str, jax.Array | np.ndarray],
        *,
        takes_part: bool = True,
        members: tuple[int, ...] | None = None,
        note: dict | None = None,
        reduction: Reduction | None = None,
    ) -> None:
        """Begin to exchange; returns at once.

        Args:
          key: the same in every region of the group, new in every exchange of the run.
          arrays: without a region axis; must not be donated or written to before `finish`.
          takes_part: False announces absence; the arrays then only tell the shapes.
          members: the group that exchanges; None = all regions.
          note: small JSON that travels with the announcement.
          reduction: how the arrays are reduced in slices; None = everyone gets those of all.

        Raises:
          ValueError: lists what is wrong with the arguments.
        """
        self._office.beats.check()
        given = {"arrays": dict(arrays), "takes_part": takes_part, "note": note}
        request = self._request(key, members, reduction=reduction, **given)
        for x in arrays.values():
            if isinstance(x, jax.Array):
                x.copy_to_host_async()
        own = self._office.beats.own
        if not own.awaited or own.wants:
            self._office.beats.update(awaited=True, wants=False)
        self._open[key] = self._gather(request)

    def ready(self, key: str) -> bool:
        """Whether `finish` would return, or raise, without waiting."""
        return self._open[key].outcome.done()

    def finish(self, key: str, like: dict[str, jax.ShapeDtypeStruct]) -> Arrived:
        """Wait until the commit record stands and all its payloads are here.

        Args:
          like: shapes and dtypes of the arrays, without a region axis; where they are reduced, of
            what comes beside the slices.

        Raises:
          Rejected: a region's payload has other shapes than `like`.
          Lost: a payload that was agreed on is gone with all who had it.
        """
        began = time.monotonic()
        gathered = self._open[key].outcome.result()
        del self._open[key]
        return arrange(gathered, like, self.count, time.monotonic() - began, self._office.tally)

    def skip(
        self,
        key: str,
        like: dict[str, jax.ShapeDtypeStruct],
        *,
        members: tuple[int, ...] | None = None,
        reduction: Reduction | None = None,
    ) -> Arrived | None:
        """Read an exchange that we did not start ourselves; None = no commit record stands yet.

        Raises:
          StoreUnavailable: try again later; and what `finish` raises.
        """
        self._office.beats.check()
        request = self._request(key, members, joins=False, reduction=reduction)
        if not stands(self._office.board, request):
            return None
        self._open[key] = self._gather(request)
        return self.finish(key, like)

    # -- states -------------------------------------------------------------------------------

    def want_state(self) -> None:
        """Ask the others for a state; they do not wait for our payloads until we `come_in`."""
        self._office.beats.update(wants=True, awaited=False)

    def asking(self) -> set[int]:
        """Other living regions that ask for a state, until they send something."""
        return set(self._states.asking())

    def donors(self) -> set[int]:
        """Other living regions that train, or have trained, with the others."""
        return self._states.donors()

    def owes_state(self) -> bool:
        """Whether this region is to give a state: others ask, and it is the lowest that does not.

        False while those that ask may still be fetching the one that this region gave them.
        """
        return self._states.owed()

    def give_state(self, step: int, arrays: dict[str, np.ndarray], document: dict) -> None:
        """Publish a state, on a thread of its own; not when this step's stands for all who ask."""
        self._states.give_soon(step, arrays, document)

    def newest_state(self) -> State | None:
        """(step, arrays, document) of the highest step that verifies. See `States.newest`."""
        self._office.beats.check()
        if self._office.closing.is_set():
            raise RuntimeError("this region has left the run")
        return self._states.newest()

    # -- inside -------------------------------------------------------------------------------

    def _request(self, key: str, members: tuple[int, ...] | None, **rest: Any) -> Request:
        group = tuple(range(self.count)) if members is None else tuple(sorted(members))
        epoch = self._office.beats.own.epoch
        wrong = problems(key, group, self.region, self.count)
        if not epoch:
            wrong.append("this region has not joined the run: call join() first")
        if key in self._open:
            wrong.append(f"key {key!r} was started and not finished; every exchange needs its own")
        if wrong:
            raise ValueError("; ".join(wrong))
        return Request(key, name_of(epoch, key, group, self.count), group, **rest)

    def _gather(self, request: Request) -> Gathering | Halves:
        self._litter.begin(request.key)
        kind = Gathering if request.reduction is None else Halves
        gathering = kind(self._office, request, self._waiting.awaited, self._done)
        self._running = [g for g in self._running if g.running] + [gathering]
        gathering.begin()
        return gathering

    def _done(self, gathering: Gathering | Halves) -> None:
        """On the thread of an exchange, when it is over."""
        if gathering.outcome.exception() is not None:
            return
        request, gathered = gathering.request, gathering.outcome.result()
        if request.joins:
            self._waiting.note(set(request.members) - {self.region}, gathered)
        self._litter.done(request.key, gathering.published)
        self._office.beats.guard(self._litter.sweep, self._states.sweep)
