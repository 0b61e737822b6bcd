r"""`RoundExchange`: rounds of learners that meet through a store alone, seen from one of them.

No learner leads, and none waits for another. `look` is one pass over the store; a thread repeats it
beside the training. Round k handles fragment k mod P. It is an `AgreedRound` without confirmations,
which a learner *reports* to by its payload and its terms: round, fragment, and the digest of the
anchor that the payload was encoded against. The first report opens the round. Steps are no terms:
every learner has its own. Rounds are committed in their order, each by the first learner that holds
the payloads of a quorum and has waited for the grace window; whom the record names is *admitted*.
Every learner lands the round (`take`), even if it reported too late or not at all.

A report stays when its learner dies, and counts. Any learner may write the record, so the death of
a reporter stops no round. The writer has read and verified the payloads of the others it names.

The grace window is eq. 3 of arXiv 2604.21428, in seconds that this learner has observed:

.. math::
   \gamma \max(0,\; \tau \xi_{\text{step}} - \xi_{\text{quorum}} - \xi_{\text{sync}})

with averages (decay 0.9) of its step, of the time from opening to quorum, and of the time to write
its own payload and to read another one. Windows of learners may differ: the record decides.

Of asynchronous methods a round is one arrival: it admits one region, the first that reported.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from lowcomm_jax.mesh.leader import led
from lowcomm_jax.rounds.agreed_round import AgreedRound
from lowcomm_jax.rounds.payloads import PayloadGC, begin_copies
from lowcomm_jax.rounds.request import Arrived, ExchangeRequest, arrange
from lowcomm_jax.schedule import Admission
from lowcomm_jax.store import terms, wire
from lowcomm_jax.store.commits import name_of
from lowcomm_jax.store.context import ExchangeContext, keep_looking

_DECAY = 0.9
_MOMENT_S = 0.05
Like = dict[str, jax.ShapeDtypeStruct]
log = logging.getLogger(__name__)


@dataclasses.dataclass
class RoundTimes:
    """What one learner has observed, in seconds: averages, None before the first.

    Attributes:
      step_s: of its inner steps.
      quorum_s: from the opening of a round to its quorum.
      sync_s: to write its own payload and to read another one.
    """

    step_s: float | None = None
    quorum_s: float | None = None
    sync_s: float | None = None

    def note(self, name: str, seconds: float) -> None:
        """Add one observation."""
        before = getattr(self, name)
        now = seconds if before is None else _DECAY * before + (1 - _DECAY) * seconds
        setattr(self, name, now)

    def slack_s(self, overlap: int) -> float:
        """Seconds of the overlap that an exchange does not need; below 0 if it needs more."""
        step_s = self.step_s or 0.0
        return overlap * step_s - (self.quorum_s or 0.0) - (self.sync_s or 0.0)

    def window_s(self, grace: float, overlap: int) -> float:
        """Seconds that a round with a quorum waits for others; inf before the first step."""
        if grace and self.step_s is None:
            return math.inf
        return grace * max(0.0, self.slack_s(overlap))


class RoundExchange:
    """One learner's side of all rounds.

    A thread of its own calls `look`. The training thread calls all else, which returns at once; in
    a job of several processes all call it, and the first one takes part (`mesh.leader.led`).

    Attributes:
      first: the first round that has not landed here.
      committed: the first round of which no record is known.
      newest: the newest round that is known to be open; `committed - 1` if none is.
      times: what this learner has observed.
    """

    def __init__(
        self,
        admission: Admission,
        most: int,
        overlap: int,
        like_K: Sequence[Like],
        first: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        """
        Args:
          most: learners that a round admits, those that reported first.
          overlap: tau.
          like_K: shapes of what a learner sends of each fragment.
          first: rounds before this one have landed here.
          clock: seconds.
        """
        self.first = self.committed = first
        self.newest = first - 1
        self.times = RoundTimes()
        self._admission, self._most = admission, most
        self._overlap, self._like_K = overlap, like_K
        self._clock, self._stepped_s = clock, None
        self._slow = self._told = False  # what was warned of
        # Of which regions' payloads the seconds were noted, by round.
        self._noted: weakref.WeakKeyDictionary[AgreedRound, set[int]] = weakref.WeakKeyDictionary()
        self._rounds: dict[int, AgreedRound] = {}  # those that have not landed here
        self._timed = first - 1  # the newest round of which it was noted when its quorum came
        self._reports: deque[tuple[int, Mapping[str, Any], Mapping[str, Any], int]] = deque()
        self._swept = first
        self._lock, self._looking = threading.Lock(), threading.Lock()
        self._wake, self._news = threading.Event(), threading.Event()

    # -- the training thread --------------------------------------------------------------------

    def begin(self, context: ExchangeContext, payload_gc: PayloadGC) -> None:
        """Start to look; the first process alone."""
        self._context, self._gc = context, payload_gc
        payload_gc.for_all = True
        context.background.begin("rounds", self._run, self._wake.set)

    @led
    def seen(self) -> tuple[int, int]:
        """`committed` and `newest`, the same in all processes.

        Raises what ended the thread, or what `Heartbeat.check` raises.
        """
        self._context.heartbeat.check()
        return self.committed, self.newest

    @led
    def stepped(self) -> tuple[int, int]:
        """An inner step is done; returns `seen`, and raises what that raises."""
        now, before = self._clock(), self._stepped_s
        self._stepped_s = now
        if before is not None:
            self.times.note("step_s", now - before)
        return self.seen()

    @led
    def wait(self) -> None:
        """Wait until a pass has found something new, for a moment at most; raises as `seen`."""
        self._news.wait(_MOMENT_S)
        self._news.clear()
        self._context.heartbeat.check()

    @led
    def report(
        self, number: int, arrays: Mapping[str, Any], terms: Mapping[str, Any], step: int
    ) -> None:
        """Send this learner's payload of a round; opens the round if nobody has.

        Args:
          arrays: `[1, ...]`, of this region, whole in its first process; must not be donated
            meanwhile.
          terms: what all that take part must agree on (`store.terms`).
          step: of this learner, for `FaultHooks`.
        """
        begin_copies(arrays)
        self._reports.append((number, arrays, terms, step))
        self.newest = max(self.newest, number)
        self._wake.set()

    @led
    def names_ours(self, number: int) -> bool | None:
        """Whether a round's record names what this job, and none before it, has published.

        None until there is a record, and all its payloads are here.

        Raises:
          Lost: a payload of the record is gone with all who had it.
          Rejected: a payload is not what this learner would have sent.
        """
        self._context.heartbeat.check()
        found = self._rounds.get(number)
        if found is None or not found.arrived():
            return None
        return found.commit.admits(*self._context.heartbeat.job)

    @led
    def take(self, number: int, ours: Mapping[str, Any]) -> Arrived:
        """What came of a round whose payloads are here; from now on it has landed here.

        Its payloads may go once it has landed everywhere.

        Args:
          ours: our terms of this round.

        Raises:
          Parted: ours do not hold, or none do; the round has not landed.
        """
        round, context = self._rounds[number], self._context
        known, record = round.commit.terms, terms.as_record(ours)
        terms.check(f"round {number}", known, context.region, record, context.heal)
        seconds = self._clock() - (round.seen_s or self._clock())
        counted, by_region = self.names_ours(number), round.arrays_of(round.commit)
        arrived = arrange(by_region, round.shapes, context.count, counted, seconds=seconds)
        self._landed(number)
        return arrived

    def _landed(self, number: int) -> None:
        with self._lock:
            found = self._rounds.pop(number)
            self.first = number + 1
        self._note_reads(found)
        found.cancel()
        self._gc.done(_key(number), found.published, at_once=False)
        self._wake.set()

    @led
    def go_on(self, first: int) -> None:
        """Forget all rounds before this one, which another exchange has made up for."""
        with self._looking:
            for found in self._rounds.values():
                found.cancel()
                self._gc.dropped(found.published)
            self._rounds.clear()
            self._reports.clear()
            self.first = self.committed = self._swept = first
            self.newest = self._timed = first - 1

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        context = self._context
        ends = context.closing, context.halted

        def over() -> bool:
            return any(one.is_set() for one in ends)

        keep_looking("rounds", self.look, over, self._wake, context.store.pauses)
        for found in list(self._rounds.values()):
            found.cancel()

    def look(self) -> bool:
        """One pass: publish, and advance the open rounds and the one after; whether any is new.

        Raises:
          StoreUnavailable: try again later.
        """
        with self._looking:
            news = self._publish()
            news |= self._hear()
            news |= self._agree()
            for found in list(self._rounds.values()):
                if found.commit is not None:
                    self._note_reads(found)
            if self.first > self._swept:
                self._swept = self.first
                self._gc.sweep()
            if news:
                self._news.set()
            return news

    def _publish(self) -> bool:
        """Write the reports that wait, except those of rounds that have a record; whether any."""
        context, news = self._context, False
        while self._reports:
            number, arrays, given, step = self._reports[0]
            if number >= self.committed:
                round, record = self._round(number), terms.as_record(given)
                context.fault_hooks.begins(_key(number), {**record, "step": step})
                round.to_host(arrays)
                round.publish(record)
                news = True
            self._reports.popleft()
        return news

    def _hear(self) -> bool:
        """Hear what is reported to open rounds, and to the one after; whether any is new."""
        news = False
        for number in itertools.count(self.committed):
            round = self._round(number)
            news |= round.hear()
            if not round.announcements and number > self.newest:
                return news
            self.newest = max(self.newest, number)
        raise AssertionError("numbers never end")

    def _agree(self) -> bool:
        """Agree on one round after the other, as far as that goes; whether there is a new record.

        What has come of all open rounds was heard before: who reported together counts together.
        """
        first = self.committed
        for number in itertools.count(self.committed):
            round = self._round(number)
            round.advance(hears=False)
            if round.commit is None:
                if not round.has_fewest():
                    self._warn_of_quorum(round)
                return number > first
            self.newest = max(self.newest, number)
            self.committed = number + 1
        raise AssertionError("numbers never end")

    def _window_s(self, number: int) -> float:
        """The grace window of a round that has its quorum; when that came is noted."""
        if number > self._timed:
            self._timed = number  # they are agreed on in their order
            self.times.note("quorum_s", self._clock() - self._rounds[number].seen_s)
        return self.times.window_s(self._admission.grace, self._overlap)

    def _warn_of_quorum(self, round: AgreedRound) -> None:
        """Warn once of a round with payloads where fewer learners live than a quorum needs."""
        if not any(round.has(region) for region in round.announcements):
            return
        living, needed = len(self._context.heartbeat.living(certain=False)), self._admission.quorum
        if living >= needed:
            self._told = False
        elif not self._told:
            self._told = True
            log.warning(
                "round %s has no quorum: %d learners are needed, %d live; training goes on, and "
                "rounds do when more are back",
                *(round.request.name, needed, living),
            )

    def _round(self, number: int) -> AgreedRound:
        with self._lock:
            if number not in self._rounds:
                context, everyone = self._context, tuple(range(self._context.count))
                epoch, key = context.heartbeat.own.epoch, _key(number)
                self._gc.begin(key)
                like = wire.without_region(self._like_K[number % len(self._like_K)])
                request = ExchangeRequest(
                    key=key,
                    name=name_of(epoch, key, everyone, context.count),
                    members=everyone,
                    takes_part=True,
                    like=dict.fromkeys(everyone, like),
                    awaited=context.wait_list.awaited,
                    least=self._admission.quorum,
                    most=self._most,
                    confirmed=False,
                    window_s=functools.partial(self._window_s, number),
                    clock=self._clock,
                    teaches=False,
                )
                self._rounds[number] = AgreedRound(context, request, news=self._wake)
            return self._rounds[number]

    def _note_reads(self, round: AgreedRound) -> None:
        """Note what each payload of a round took, once it is here and the round has its record.

        Windows of rounds that are open before one has landed need it. Warns once where the overlap
        hides no exchange.
        """
        with self._lock:  # passes and landings come here
            noted = self._noted.setdefault(round, set())
            new = {r: x for r, x in list(round.fetches.items()) if x.complete and r not in noted}
            noted.update(new)
        for fetch in new.values():
            self.times.note("sync_s", round.write_s + fetch.moved[1])
        step_s = self.times.step_s
        hides = self._overlap > 0 and not self._slow
        if hides and step_s and (self.times.sync_s or 0) > self._overlap * step_s:
            self._slow = True
            log.warning(
                "writing a payload and reading one takes %.3g s, but overlap=%d inner steps take "
                "%.3g s: rounds land later; use a larger overlap, or a nearer store",
                *(self.times.sync_s, self._overlap, self._overlap * step_s),
            )


def _key(number: int) -> str:
    """The key of a round; the last synchronisation has numbers as keys."""
    return f"round{number}"
