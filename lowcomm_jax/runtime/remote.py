"""Exchange between independent jobs, one per region: nothing is shared but a key-value store.

An exchange of a key goes: publish our payload; announce it; fetch what others announce; agree on
who took part by one create-only commit record; have all that it names. Payloads that are reduced in
slices go through that twice (`halves`). All on threads; bytes are authenticated, not encrypted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import wait
from typing import Any

import jax
import numpy as np

from lowcomm_jax.runtime.anchor_check import Moments
from lowcomm_jax.runtime.commits import name_of
from lowcomm_jax.runtime.context import ExchangeContext
from lowcomm_jax.runtime.membership import Membership
from lowcomm_jax.runtime.request import Arrived, ExchangeRequest, arrange, problems
from lowcomm_jax.runtime.state_transfer import State
from lowcomm_jax.runtime.two_shot_exchange import TwoShotExchange, stands
from lowcomm_jax.runtime.whole_exchange import WholeExchange
from lowcomm_jax.runtime.wire import Reduction


class RemoteExchange(Membership):
    """One region's side of the exchange; made by `exchange.store` and `exchange.peers`.

    Methods may be called from one thread; most raise `Superseded` when the place is taken, and
    `Lost` when the others have begun the run anew.
    """

    def __init__(self, office: ExchangeContext, kind: str, keep: int):
        super().__init__(office, kind, keep)
        self._open: dict[str, WholeExchange | TwoShotExchange] = {}
        self._waited: dict[str, float] = {}
        self._patience_s = 0.0

    @property
    def epoch(self) -> int:
        """Number of the run's beginning that this region has joined (`joining.enter`), from 1."""
        return self._office.beats.own.epoch

    # -- exchanges ----------------------------------------------------------------------------

    def start(
        self,
        key: str,
        arrays: dict[str, jax.Array | np.ndarray],
        *,
        takes_part: bool = True,
        members: tuple[int, ...] | None = None,
        terms: Mapping[str, Any] | None = None,
        reduction: Reduction | None = None,
    ) -> None:
        """Begin to exchange; returns at once.

        Args:
          key: the same in every region of the group, new in every exchange of the run.
          arrays: without a region axis; must not be donated or written to before `finish`.
          takes_part: False announces absence; the arrays then only tell the shapes.
          members: the group that exchanges; None = all regions.
          terms: what must be the same in all regions that take part, whole numbers and small uint32
            arrays; the commit record has everyone's. Who does not name one agrees to any.
          reduction: how the arrays are reduced in slices; None = everyone gets those of all.

        Raises:
          ValueError: lists what is wrong with the arguments.
        """
        self._office.beats.check()
        given = {"arrays": dict(arrays), "takes_part": takes_part, "terms": terms or {}}
        given |= {"reduction": reduction, "patience_s": self._patience_s}
        request = self._request(key, members, **given)
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

    def be_patient(self, seconds: float) -> None:
        """Wait so much longer than usual for the others, in what is started from now on."""
        self._patience_s = seconds

    def reachable(self) -> bool:
        """Whether the store can be used; one that has just gone away is given a moment."""
        return self._office.beats.back()

    def arrives(self, key: str) -> bool:
        """Wait until `finish` would return without waiting; False where the store is away."""
        began, outcome = time.monotonic(), self._open[key].outcome
        while not outcome.done() and self.reachable():
            wait([outcome], timeout=self._office.timing.beat_s / 4)
        self._waited[key] = self._waited.get(key, 0.0) + time.monotonic() - began
        return outcome.done()

    def finish(self, key: str, like: dict[str, jax.ShapeDtypeStruct]) -> Arrived:
        """Wait until the commit record stands and all its payloads are here.

        Args:
          like: shapes and dtypes of the arrays, without a region axis; where they are reduced, of
            what comes beside the slices.

        Raises:
          Rejected: a region's payload has other shapes than `like`.
          Lost: a payload that was agreed on is gone with all who had it.
          Parted: other terms hold than those of this region, or none do.
        """
        began = time.monotonic()
        gathered = self._open[key].outcome.result()
        del self._open[key]
        waited = self._waited.pop(key, 0.0) + time.monotonic() - began
        return arrange(gathered, like, self.count, waited, self._office.tally)

    def skip(
        self,
        key: str,
        like: dict[str, jax.ShapeDtypeStruct],
        *,
        members: tuple[int, ...] | None = None,
        terms: Mapping[str, Any] | None = None,
        reduction: Reduction | None = None,
    ) -> Arrived | None:
        """Read an exchange that we did not start ourselves; None = no commit record stands yet.

        Raises:
          StoreUnavailable: try again later; and what `finish` raises.
        """
        self._office.beats.check()
        request = self._request(key, members, joins=False, terms=terms or {}, reduction=reduction)
        if not stands(self._office.board, request):
            return None
        self._open[key] = self._gather(request)
        return self.finish(key, like)

    def passed_over(self, key: str) -> bool:
        """Whether others have settled on an exchange of all regions without this one, and no commit
        record stands yet.

        Raises:
          StoreUnavailable: try again later.
        """
        everyone, office = tuple(range(self.count)), self._office
        name = name_of(office.beats.own.epoch, key, everyone, self.count)
        others = office.beats.living() - {self.region}
        held = [office.board.confirmed(name, region) for region in others]
        passed = any(one is not None and self.region not in one for one in held)
        return passed and office.board.standing(name) is None

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
        """Whether this region is to give a state: others ask, and of those that do not, and have
        landed what has landed, it is the lowest.

        False while those that ask may still be fetching the one that this region gave them.
        """
        return self._states.owed()

    def give_state(self, step: int, arrays: dict[str, np.ndarray], document: dict) -> None:
        """Publish a state, on a thread of its own; not when this step's stands for all who ask."""
        self._states.give_soon(step, arrays, document)

    def vouch(self, moments: Moments) -> None:
        """Tell those that ask for a state which anchors we have had. See `Vouching.tell_soon`."""
        self._vouching.tell_soon(moments)

    def agrees(self, step: int, moment: str, own: Mapping[str, Any], at_last: bool) -> bool:
        """Compare a state with what all others had. See `Vouching.agrees`."""
        self._office.beats.check()
        return self._vouching.agrees(step, moment, own, at_last)

    def newest_state(self) -> State | None:
        """(step, arrays, document) of the highest step that verifies. See `States.newest`."""
        self._office.beats.check()
        if self._office.closing.is_set():
            raise RuntimeError("this region has left the run")
        return self._states.newest()

    # -- inside -------------------------------------------------------------------------------

    def _request(self, key: str, members: tuple[int, ...] | None, **rest: Any) -> ExchangeRequest:
        group = tuple(range(self.count)) if members is None else tuple(sorted(members))
        epoch = self._office.beats.own.epoch
        wrong = problems(key, group, self.region, self.count)
        if not epoch:
            wrong.append("this region has not joined the run: call join() first")
        if key in self._open:
            wrong.append(f"key {key!r} was started and not finished; every exchange needs its own")
        if wrong:
            raise ValueError("; ".join(wrong))
        return ExchangeRequest(key, name_of(epoch, key, group, self.count), group, **rest)

    def _gather(self, request: ExchangeRequest) -> WholeExchange | TwoShotExchange:
        self._litter.begin(request.key)
        kind = WholeExchange if request.reduction is None else TwoShotExchange
        gathering = kind(self._office, request, self._waiting.awaited, self._done)
        self._running = [g for g in self._running if g.running] + [gathering]
        gathering.begin()
        return gathering

    def _done(self, gathering: WholeExchange | TwoShotExchange) -> None:
        """On the thread of an exchange, when it is over."""
        if gathering.outcome.exception() is not None:
            return
        request, gathered = gathering.request, gathering.outcome.result()
        if request.joins:
            self._waiting.note(set(request.members) - {self.region}, gathered)
        self._litter.done(request.key, gathering.published)
        self._office.beats.guard(self._litter.sweep, self._states.sweep)
