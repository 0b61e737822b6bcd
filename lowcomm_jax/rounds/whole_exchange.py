"""`WholeExchange`: one exchange of one key: publishes this region's payload, and gets all others'.

It gives an `ExchangeResult`, the same in every region. It raises `Parted` where terms differ, and
`Lost` where an agreed payload is gone.

When a region does not answer, the others do this, in the order of calls (what else decides without
a region: the table in `rounds/__init__.py`):

1. `_agree` calls `_propose` until there is a commit record; `_propose` first calls `_confirm`.
2. `_confirm` asks `Round.is_final` for each member. For one that has announced nothing it waits as
   long as `WaitList.awaited` (store/wait_list.py) says so. Without a heartbeat for
   `Timing.patience_s` that region is dead, and the wait ends. For a living one it waits until the
   loop needs the outcome (`Due`), and from then on for `Pace.deadline_s` (store/timing.py): derived
   from earlier exchanges, `first_s` in the first three, and more after an outage. It is doubled
   with every exchange that has waited for the region in vain since it last announced: otherwise a
   region that goes on at the pace of the others might never come nearer. The wait ends sooner where
   all others that announced have confirmed without that region (`_passed_over`). Then `_confirm`
   publishes which payloads this region holds.
3. `_propose` waits for the confirmations of the others, two deadlines at most. `participants`
   leaves out payloads that not all of them hold. `CommitLog.commit` (store/commits.py) writes the
   one record.
4. `_complete` fetches the payloads that the record names. No region counts any other payload.
5. The record says which regions are late (`WaitList.late_in`, store/wait_list.py), and every region
   stores that (`WaitList.note`; `RemoteExchange._done` calls it): later exchanges wait for none of
   them until it has caught up.

The region that did not answer does this:

- Late, but alive: it reads the record when it gets there and lands the payloads that the others
  landed. Its own values and its residual stay as if it had not sent (`JobDelivery._uncount`,
  jobs/job_delivery.py). Where the fragment was sent again since (DiLoCoX), that payload is lost.
- Dead, and started again: it takes a state from another region (recovery/rejoin.py).
- A payload of the record is gone from all regions: it raises `Lost`, and takes a state, too.
- Cut off from the store: it trains on, and runs the deferred events later (`JobCarrier.reach`).

A part of the payload may have travelled before (`early_payload`): a region then holds a payload, in
all of this, once both are here.

`two_shot_exchange` does the same for slices, in two exchanges one after the other.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from lowcomm_jax.rounds.request import Due, ExchangeRequest, ExchangeResult
from lowcomm_jax.rounds.round import Round
from lowcomm_jax.store import terms, wire
from lowcomm_jax.store.commits import Job
from lowcomm_jax.store.context import ExchangeContext, check_open, until_answered
from lowcomm_jax.store.errors import StoreUnavailable
from lowcomm_jax.store.records import Commit

T = TypeVar("T")

Holdings = Mapping[int, str]
"""The payloads that one region holds and has verified: digests by region."""


class WholeExchange(Round):
    """One exchange: a round of all its members, of which this region writes the record, or another.

    Attributes:
      began: the time at which this region's arrays were computed (`time.monotonic`).
      due: whether the loop waits for the outcome.
    """

    def __init__(
        self,
        context: ExchangeContext,
        request: ExchangeRequest,
        awaited: Callable[[int], bool],
        early: Round | None = None,
        due: Due | None = None,
    ):
        """
        Args:
          awaited: whether to wait for a region (`WaitList.awaited`).
          early: see `Round`.
          due: of the exchange that this one is a part of; None = it is one by itself.
        """
        super().__init__(context, request, early)
        self.due = due or Due()
        self._check = functools.partial(check_open, context, f"exchange {request.key!r}")
        self._retry = functools.partial(until_answered, context, f"exchange {request.key!r}")
        self._arrays, self._awaited = request.arrays, awaited
        self._held: dict[int, Holdings] | None = None
        self._silent: list[int] = []
        self._asked_s = context.heartbeat.clock_s
        self._terms: terms.Terms = {}
        self._late_s = 0.0
        self._announced_s = self._since_s = context.heartbeat.clock_s
        self.began = time.monotonic()

    def wake(self) -> None:
        """Let `result` see at once that exchanges end."""
        self.news.set()

    def result(self) -> ExchangeResult:
        """Run it, in the background.

        Raises:
          Lost: a payload that was agreed on is gone with all who had it.
          Parted: this region's terms do not hold, or no region's do.
          RuntimeError: this region has left meanwhile.
        """
        try:
            self._terms = terms.as_record(self.request.terms)
            if self.request.joins:
                self._send()
            commit = self._agree()
            label, context = f"exchange {self.request.key}", self._context
            terms.check(label, commit.terms, context.region, self._terms, context.heal)
            return ExchangeResult(commit, self._complete(commit), time.monotonic() - self.began)
        finally:
            self.cancel()

    # -- 1: publish ---------------------------------------------------------------------------

    def _send(self) -> None:
        """Publish our payload, then announce it; neither if there is a commit record already."""
        request, context = self.request, self._context
        context.fault_hooks.begins(request.key, self._terms)
        self.to_host(self._arrays)
        self._arrays = {}  # this exchange needs the device's copies no longer
        self.began = time.monotonic()  # until now the device was computing
        if self._retry(lambda: context.commit_log.committed(request.name)) is None:
            self.publish(self._retry, self._terms, self._check)
            self._announced_s = self._since_s = context.heartbeat.clock_s

    # -- 2: agree on who took part ------------------------------------------------------------

    def _agree(self) -> Commit:
        """Wait for a commit record; write it as soon as there is no region to wait for."""
        context, pauses, known = self._context, self._context.store.pauses(), None
        while True:
            self._check()
            try:
                commit = context.commit_log.committed(self.request.name)
                if commit is None and self.request.joins:
                    commit = self._propose()
                if commit is not None:
                    return commit
            except StoreUnavailable:
                pass  # The heartbeat reports it; deadlines stand still meanwhile.
            if self._known != known:
                # The others are about as far as we are: what we wait for next is not far.
                known, pauses = self._known, context.store.pauses()
            self.news.wait(next(pauses))
            self.news.clear()

    @property
    def _known(self) -> tuple[int, int, int]:
        """Numbers of announcements, payloads and confirmations so far."""
        here = sum(self.has(region) for region in self.fetches)
        return len(self.announcements), here, len(self._held or ())

    def _propose(self) -> Commit | None:
        """One look: writes the commit record, unless a region has still to be waited for."""
        if self._held is None and not self._confirm():
            return None
        context = self._context
        announced = self.announcements
        living = context.heartbeat.living(certain=False)
        known = {r: one.terms for r, one in announced.items() if r in living or self.has(r)}
        counting = terms.counting(known, context.heal)
        published = {r: announced[r].payload for r in counting if announced[r].payload}
        missing = [Job(r, announced[r].incarnation) for r in published.keys() - self._held.keys()]
        self._held |= context.commit_log.confirmed(self.request.name, missing)
        # A region may wait as long for payloads before it confirms: later than we began to wait.
        unsure = published.keys() - self._held.keys()
        unsure = [r for r in unsure if r in living and not self.replaced(r)]
        if not self._waited_enough(unsure, deadlines=2):
            return None
        digests = {r: p.content for r, p in published.items()}
        chosen = participants(digests, self._held)
        if not all(self.has(r) for r in chosen):
            # Only we lack a payload: the others write the record, as long as they live.
            if not self._waited_enough([r for r in chosen if r in living], deadlines=2):
                return None
            chosen = participants({r: d for r, d in digests.items() if self.has(r)}, self._held)
        here = {*chosen, *(counting & living)}
        late = {}
        if not self.request.follows:
            silent = set(self.request.members) - announced.keys()
            late = context.wait_list.late_in(silent, self._silent)
        commit = self.record(chosen, here, known, late)
        return context.commit_log.commit(self.request.name, commit)

    def _confirm(self) -> bool:
        """Look for payloads; True once this region waits for none, and has confirmed its own."""
        context, request = self._context, self.request
        if self.look():
            self._late_s = context.heartbeat.clock_s - self._announced_s
            came = [region for region in self._silent if region in self.announcements]
            if request.patience_s or self._missed(came):
                # What was just announced has still to come: for that the usual time is enough.
                self._since_s = context.heartbeat.clock_s
        waiting = [r for r in request.members if not self.is_final(r, self._awaited)]
        self._silent = [r for r in waiting if r not in self.announcements]
        missed, patience_s = self._missed(self._silent), request.patience_s if self._silent else 0.0
        enough = self._waited_enough(waiting, missed=missed, patience_s=patience_s)
        if not enough and not self._passed_over(waiting):
            return False
        announced = sorted(self.announcements.items())
        held = {r: one.payload.content for r, one in announced if self.has(r)}
        if self.own is not None:
            # What a lost answer hides was said first, and stands.
            held = context.commit_log.confirm(request.name, context.heartbeat.job, held)
        longer_in_vain = waiting and missed  # which says nothing of how late the others are
        if not (request.follows or request.patience_s or longer_in_vain):
            now = context.heartbeat.clock_s
            context.pace.announced(now - self._announced_s if waiting else self._late_s)
        self._held = {context.region: held}
        self._since_s = context.heartbeat.clock_s
        return True

    def _missed(self, regions: Iterable[int]) -> int:
        # Who is to bring averages has announced before, in the exchange that this one follows.
        return 0 if self.request.follows else self._context.wait_list.missed(regions)

    def _passed_over(self, waiting: list[int]) -> bool:
        """Whether, of these, each was left out by another region: then it cannot count any more.

        The others may not have read yet that a region which joins is to be waited for.
        """
        context, now = self._context, self._context.heartbeat.clock_s
        announced = self.announcements.keys()
        if now < self._asked_s + context.timing.beat_s or announced & set(waiting):
            return False
        self._asked_s = now
        others = self.announcements.items()
        jobs = [Job(r, one.incarnation) for r, one in others if r != context.region]
        held = context.commit_log.confirmed(self.request.name, jobs).values()
        return all(any(r not in one for one in held) for r in waiting)

    @property
    def _waited_s(self) -> float:
        """Seconds for which the loop has waited since the time at `_since_s`.

        0 while the loop computes: what the others bring meanwhile keeps nobody from training.
        """
        due_s = self.due.since_s  # the loop's thread may change it
        if due_s is None:
            return 0.0
        return self._context.heartbeat.clock_s - max(self._since_s, due_s)

    def _waited_enough(
        self, waiting: list[int], deadlines: int = 1, missed: int = 0, patience_s: float = 0.0
    ) -> bool:
        """Whether the wait is over: there is no region to wait for, or the deadline has passed."""
        me, announced = self._context.region, self.announcements.values()
        nbytes = sum(one.payload.nbytes_for(me) for one in announced if one.payload)
        deadline_s = deadlines * self._context.pace.deadline_s(nbytes, missed) + patience_s
        return not waiting or self._waited_s >= deadline_s

    # -- 3: have every payload of the record --------------------------------------------------

    def _complete(self, commit: Commit) -> dict[int, wire.Arrays]:
        """Fetch every payload that the commit record names; returns their arrays by region."""
        ours = commit.saw(*self._context.heartbeat.job)
        if self.request.joins and not self.announcements:
            # The record was there before we looked. Still fetch what was offered to us: bytes that
            # nobody pulls stay in the sender's memory.
            self._retry(lambda: self.look(ours))
        self.fetch_named(commit, ours)
        while (arrays := self.arrays_of(commit)) is None:
            self._check()
            self.news.wait(self._context.store.poll_s[1])
            self.news.clear()
        return arrays


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
