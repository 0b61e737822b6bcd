"""`AgreedRound`: one round of one key; when its commit record is written, and what that names.

All rounds between jobs are this one (the table in `rounds/__init__.py`). An exchange runs on a
thread of its own to its `result`, everyone's arrays, the same in every region. Learners' rounds are
advanced together (`paced_rounds`). Either raises `Parted` where terms differ, and `Lost` where an
agreed payload is gone.

`advance` is one pass: it reads the commit record, else hears what is announced, else proposes the
record. `keep_looking` repeats it. When a region does not answer, the others do this:

1. `has_fewest`: nothing is proposed before `least` payloads are here. Where the round has a
   window, that begins now.
2. `_stops_waiting` asks `Round.is_final` for each member. For one that has announced nothing it
   waits as long as `awaited` says so: of exchanges `WaitList.awaited` (store/wait_list.py). Without
   a heartbeat for `Timing.patience_s` that region is dead, and the wait ends. For a living one it
   waits for the round's window, if that has one. An exchange waits until the loop needs the outcome
   (`Due`), and from then on for `Pace.deadline_s` (store/timing.py). That is derived from earlier
   exchanges, `first_s` in the first three, and more after an outage. It is doubled with every
   exchange that has waited for the region in vain since it last announced: otherwise a region that
   goes on at the pace of the others might never come nearer. The wait ends sooner where all others
   that announced have confirmed without that region (`_passed_over`).
3. Where the admitted confirm, this region then says which payloads it holds (`_confirm`), and
   `_all_confirmed` waits for the others to do so, two deadlines at most. `participants` leaves out
   payloads that not all of them hold. Where nobody confirms, payloads outlive who wrote them.
4. `CommitLog.commit` (store/commits.py) writes the one record, of `most` payloads at most: those
   that were announced first.
5. Every region fetches the payloads that the record names (`_fetch_all`), and counts no other.
6. The record of an exchange says which regions are late (`WaitList.late_in`), and every region
   stores that (`WaitList.note`; `RemoteExchange._done` calls it): later exchanges wait for none of
   them until it has caught up.

A region that did not answer reads the record when it gets there, and lands the same payloads. What
it then keeps of its own is said where it is done (`uncounted` and `JobCarrier.reach`, in
jobs/job_carrier.py).

A part of the payload may have travelled before (`early_payload`): a region then holds a payload, in
all of this, once both are here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Set
from concurrent.futures import Future

from lowcomm_jax.rounds.request import Due, ExchangeRequest
from lowcomm_jax.rounds.round import Round
from lowcomm_jax.store import terms
from lowcomm_jax.store.commits import Job
from lowcomm_jax.store.context import ExchangeContext, check_open, keep_looking
from lowcomm_jax.store.records import Admitted, Commit, Payload
from lowcomm_jax.store.wire import Arrays

Holdings = Mapping[int, str]
"""The payloads that one region holds and has verified: digests by region."""


class AgreedRound(Round):
    """A round that all its members agree on: this region writes its record, or another.

    Attributes:
      began: the time at which this region's arrays were computed (`time.monotonic`).
      commit: the record; None = it is not known yet.
      reduced: `[parts, ...]`, the reduced slices, once they are here, of payloads that are reduced
        so.
      seconds: from `began` to the arrival of the last payload, once it is here.
      due: since when the wait for others is limited.
      outcome: of an exchange that runs in the background: what `result` returns or raises.
      waited: seconds for which the loop was blocked by it so far.
      seen_s: when something was first seen to be announced, on the round's clock; None = nothing
        was.
    """

    def __init__(
        self,
        context: ExchangeContext,
        request: ExchangeRequest,
        early: Round | None = None,
        due: Due | None = None,
        news: threading.Event | None = None,
    ):
        """
        Args:
          early: arrays that belong to the payload, and were sent before; None = there are none.
          due: of the round that this one is a part of; None = it is one by itself.
          news: see `Round`.
        """
        super().__init__(context, request, early, news)
        self.due = due or Due()
        self.outcome: Future[dict[int, Arrays]] = Future()
        self.waited = 0.0
        self.commit: Commit | None = None
        self.reduced: Arrays | None = None
        self.seconds = 0.0
        self.seen_s: float | None = None
        self._arrays = request.arrays
        self._held: dict[int, Holdings] | None = None
        self._silent: list[int] = []
        self._offered: terms.Terms | None = None  # with our payload, until that is announced
        self._late_s = 0.0
        self._asked_s = self._announced_s = self._since_s = self._now_s
        self.began = time.monotonic()

    @property
    def _now_s(self) -> float:
        clock = self.request.clock
        return self._context.heartbeat.clock_s if clock is None else clock()

    # -- an exchange, from its beginning to its end -----------------------------------------------

    def result(self) -> dict[int, Arrays]:
        """Run it, in the background; returns the arrays of the regions that took part.

        Of payloads that are reduced in slices: those beside the slices.

        Raises:
          Lost: a payload that was agreed on is gone with all who had it.
          Parted: this region's terms do not hold, or no region's do.
          RuntimeError: this region has left meanwhile.
        """
        try:
            request, context = self.request, self._context
            ours, label = terms.as_record(request.terms), f"exchange {request.key}"
            if request.joins:
                self._offer(ours)
            self._until(lambda: self.commit is not None)
            terms.check(label, self.commit.terms, context.region, ours, context.heal)
            self._until(self.arrived)
            arrays = self.arrays_of(self.commit)
            assert arrays is not None  # it has arrived
            return arrays
        finally:
            self.seconds = time.monotonic() - self.began
            self.cancel()

    def _offer(self, ours: terms.Terms) -> None:
        """Bring our payload to the host; it is published unless there is a commit record before."""
        self._context.fault_hooks.begins(self.request.key, ours)
        self.to_host(self._arrays)
        self._arrays = {}  # this exchange needs the device's copies no longer
        self.began = time.monotonic()  # until now the device was computing
        self._offered = ours

    def _until(self, done: Callable[[], bool]) -> None:
        context, what = self._context, f"exchange {self.request.key!r}"

        def over() -> bool:
            is_done = done()
            if not is_done:
                check_open(context, what)
            return is_done

        keep_looking(what, self.advance, over, self.news, context.store.pauses)

    def arrived(self) -> bool:
        """Whether there is a commit record, and all payloads that it names are here.

        Raises:
          Lost: one is gone with all who had it.
          Rejected: one does not fit this round.
        """
        return self.commit is not None and self.arrays_of(self.commit) is not None

    # -- one pass ---------------------------------------------------------------------------------

    def advance(self, hears: bool = True) -> bool:
        """Do what can be done now, until there is a commit record; returns whether any is new.

        Args:
          hears: look for announcements first; False = that was done (`hear`).

        Raises:
          StoreUnavailable: try again later.
        """
        if self.commit is not None:
            return False
        request, confirmed, heard = self.request, len(self._held or ()), False
        commit = self._context.commit_log.committed(request.name)
        job = self._context.heartbeat.job
        if self._offered is not None and (commit is None or commit.admits(*job)):
            # A record that admits this job has its announcement, whose answer was lost.
            return self._announce(self._offered)
        if commit is None and request.joins:
            heard = hears and self._held is None and self.hear()
            commit = self.propose()
        if commit is None:
            return heard or len(self._held or ()) > confirmed
        self._fetch_all(commit)
        self.commit = commit
        return True

    def _announce(self, ours: terms.Terms) -> bool:
        """Publish and announce our payload; False = what belongs to it is still on its way."""
        if not self.publish(ours):
            return False
        self._offered = None
        self._announced_s = self._since_s = self._now_s
        return True

    def hear(self) -> bool:
        """Look for announcements; returns whether any is new."""
        heard, now = self.look(), self._now_s
        if self.seen_s is None and self.announcements:
            self.seen_s = now
        if heard:
            self._late_s = now - self._announced_s
            came = [region for region in self._silent if region in self.announcements]
            if self.request.patience_s or self._missed(came):
                # What was just announced has still to come: for that the usual time is enough.
                self._since_s = now
        return heard

    def _fetch_all(self, commit: Commit) -> None:
        """Fetch every payload that the commit record names, and that is not here."""
        self.reduces = self.request.joins and commit.saw(*self._context.heartbeat.job)
        if self.request.joins and not self.announcements:
            # The record was there before we looked. Still hear who has published something: of the
            # dead it may be this region's to remove (`PayloadGC`).
            self.hear()
        for region, admitted in commit.admitted.items():
            job = Job(region, admitted.incarnation)
            if job != self._context.heartbeat.job or self.own is None:
                self.fetch_of(job, admitted.payload)

    # -- the record: when it is written, and what it names ----------------------------------------

    def propose(self) -> Commit | None:
        """Write the commit record, unless a region has still to be waited for.

        Where nobody confirms, it names those that it admits, and nobody else.
        """
        request, context, announced = self.request, self._context, self.announcements
        if not self.has_fewest() or (self._held is None and not self._stops_waiting()):
            return None
        living = context.heartbeat.living(certain=False)
        known = self._terms_of(living)
        counting = terms.counting(known, context.heal)
        published = {r: announced[r].payload for r in counting if announced[r].payload}
        if request.confirmed and not self._all_confirmed(published, living):
            return None
        digests = {r: p.content for r, p in published.items()}
        held = self._held or {}
        chosen = participants(digests, held)
        if not all(self.has(r) for r in chosen):
            # Only we lack a payload: the others write the record, as long as they live.
            if not self._waited_enough([r for r in chosen if r in living], deadlines=2):
                return None
            chosen = participants({r: d for r, d in digests.items() if self.has(r)}, held)
        chosen = [r for r in announced if r in chosen][: request.most]
        here = {*chosen, *(counting & living)} if request.confirmed else set(chosen)
        said = {r: one for r, one in known.items() if request.confirmed or r in here}
        late = {}
        if request.teaches:
            late = context.wait_list.late_in(set(request.members) - announced.keys(), self._silent)
        jobs = {r: Admitted(announced[r].incarnation, announced[r].payload) for r in sorted(chosen)}
        present = {r: announced[r].incarnation for r in sorted(here)}
        record = Commit(jobs, said, context.region, present, late)
        return context.commit_log.commit(request.name, record)

    def _terms_of(self, living: Set[int]) -> dict[int, terms.Terms]:
        """The terms of those whose payload is here; who confirms has a part without one, too."""
        counts = living if self.request.confirmed else ()
        return {r: x.terms for r, x in self.announcements.items() if r in counts or self.has(r)}

    def has_fewest(self) -> bool:
        """Whether so many payloads are here that the round can be agreed on; its window begins."""
        least = self.request.least
        if least:
            known = self._terms_of(())
            if not known or len(terms.counting(known, self._context.heal)) < least:
                return False
        if self.request.window_s is not None:
            self.due.begin(self._now_s)
        return True

    def _stops_waiting(self) -> bool:
        """Whether this region waits for no payload any longer; then it has confirmed its own."""
        request = self.request
        waiting = [r for r in request.members if not self.is_final(r)]
        self._silent = [r for r in waiting if r not in self.announcements]
        missed, patience_s = self._missed(self._silent), request.patience_s if self._silent else 0.0
        enough = self._waited_enough(waiting, missed=missed, patience_s=patience_s)
        if not enough and not self._passed_over(waiting):
            return False
        if request.confirmed:
            self._confirm()
            longer_in_vain = waiting and missed  # which says nothing of how late the others are
            late_s = self._now_s - self._announced_s if waiting else self._late_s
            # A round that is only ended, of which all is known at once, says nothing either.
            measured = self.own is not None or late_s
            if request.teaches and measured and not (request.patience_s or longer_in_vain):
                self._context.pace.announced(late_s)
        return True

    def _confirm(self) -> None:
        """Say which payloads this region holds, if it has announced one; it hears no others."""
        context, announced = self._context, sorted(self.announcements.items())
        held = {r: one.payload.content for r, one in announced if self.has(r)}
        if self.own is not None:
            # What a lost answer hides was said first, and stands.
            held = context.commit_log.confirm(self.request.name, context.heartbeat.job, held)
        self._held = {context.region: held}
        self._since_s = self._now_s

    def _all_confirmed(self, published: Mapping[int, Payload], living: Set[int]) -> bool:
        """Whether no confirmation of these regions is waited for any longer."""
        announced = self.announcements
        missing = [Job(r, announced[r].incarnation) for r in published.keys() - self._held.keys()]
        self._held |= self._context.commit_log.confirmed(self.request.name, missing)
        # A region may wait as long for payloads before it confirms: later than we began to wait.
        unsure = published.keys() - self._held.keys()
        unsure = [r for r in unsure if r in living and not self.replaced(r)]
        return self._waited_enough(unsure, deadlines=2)

    def _missed(self, regions: Iterable[int]) -> int:
        # Who is to bring averages has announced before, in the exchange that this one follows.
        return self._context.wait_list.missed(regions) if self.request.teaches else 0

    def _passed_over(self, waiting: list[int]) -> bool:
        """Whether, of these, each was left out by another region: then it cannot count any more.

        The others may not have read yet that a region which joins is to be waited for.
        """
        context, now, announced = self._context, self._now_s, self.announcements.keys()
        if not self.request.confirmed or announced & set(waiting):
            return False
        if now < self._asked_s + context.timing.beat_s:
            return False
        self._asked_s = now
        others = self.announcements.items()
        jobs = [Job(r, one.incarnation) for r, one in others if r != context.region]
        held = context.commit_log.confirmed(self.request.name, jobs).values()
        return all(any(r not in one for one in held) for r in waiting)

    @property
    def _waited_s(self) -> float:
        """Seconds for which it was due since the time at `_since_s`.

        0 while the loop computes: what the others bring meanwhile keeps nobody from training.
        """
        due_s = self.due.since_s  # the loop's thread may change it
        return 0.0 if due_s is None else self._now_s - max(self._since_s, due_s)

    def _waited_enough(
        self, waiting: list[int], deadlines: int = 1, missed: int = 0, patience_s: float = 0.0
    ) -> bool:
        """Whether the wait is over: there is no region to wait for, or the deadline has passed."""
        if self.request.window_s is not None:
            deadline_s = self.request.window_s()
        else:
            me, announced = self._context.region, self.announcements.values()
            nbytes = sum(one.payload.nbytes_for(me) for one in announced if one.payload)
            deadline_s = self._context.pace.deadline_s(nbytes, missed)
        return not waiting or self._waited_s >= deadlines * deadline_s + patience_s


def participants(published: Holdings, held: Mapping[int, Holdings]) -> list[int]:
    """The regions whose payloads every one of them holds, ascending.

    The death of a region, or damage to its payload on the way, then leaves the others with all
    payloads that they need. While a region lacks a payload, the one that the fewest hold is left
    out; of several, that of the highest region.

    Args:
      published: digests of the payloads.
      held: payloads held by each region that has confirmed. Others are taken to hold all of them,
        since they have no part in this decision and fetch later.
    """
    within = set(published)

    def holders(region: int) -> list[int]:
        return [by for by in within if by not in held or held[by].get(region) == published[region]]

    while lacking := [region for region in within if len(holders(region)) < len(within)]:
        within.remove(min(lacking, key=lambda region: (len(holders(region)), -region)))
    return sorted(within)
