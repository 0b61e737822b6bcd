"""`RemoteExchange`: one region's side of the exchange between jobs, one per region.

The jobs share nothing but a key-value store. An exchange is an `AgreedRound`; of payloads that are
reduced in slices it is two of them, three after a loss (`TwoShotExchange`). All work is on threads.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from typing import Any

import jax
import numpy as np

from lowcomm_jax.mesh.leader import led
from lowcomm_jax.rounds.agreed_round import AgreedRound
from lowcomm_jax.rounds.early_payload import EarlyPayload
from lowcomm_jax.rounds.membership import Membership
from lowcomm_jax.rounds.paced_rounds import Like, RoundExchange
from lowcomm_jax.rounds.payloads import begin_copies
from lowcomm_jax.rounds.request import Arrived, ExchangeRequest, arrange, problems
from lowcomm_jax.rounds.slicing import Slicing
from lowcomm_jax.rounds.state_transfer import AnchorVersions
from lowcomm_jax.rounds.two_shot_exchange import TwoShotExchange, averages_of
from lowcomm_jax.schedule import Admission
from lowcomm_jax.store import wire
from lowcomm_jax.store.commits import Job, name_of
from lowcomm_jax.store.context import ExchangeContext, until_answered
from lowcomm_jax.store.errors import StoreUnavailable
from lowcomm_jax.store.kv import AT_ONCE, at_once
from lowcomm_jax.store.records import Announcement, Commit
from lowcomm_jax.store.terms import Heal, Terms

RUNNING = 3
"""So many exchanges in a row without this region are no accident."""

_MOST_AHEAD = 1 << 30
log = logging.getLogger(__name__)


class RemoteExchange(Membership):
    """One region's side of the exchange; made by `connect`.

    All methods must be called from one thread. Where the job is several processes, all of them call
    the same methods in one order: the first one takes part in the exchange, and all get what it
    gets (`mesh.leader.led`). Most methods raise `Superseded` when the place is taken, and
    `Lost` when the others have begun the run anew.
    """

    def __init__(
        self,
        region: int,
        count: int,
        heal: Heal,
        make: Callable[[], ExchangeContext],
        keep: int | None,
    ):
        """See `Membership`."""
        super().__init__(region, count, heal, make, keep)
        self._open: dict[str, AgreedRound] = {}
        self._early: dict[str, EarlyPayload] = {}  # those that no exchange has taken yet
        self._stops: Callable[[], bool] = lambda: False
        self._missed: set[int] = set()  # by the exchanges that were finished last
        self._counted: deque[bool] = deque(maxlen=RUNNING)  # whether they counted what we sent
        self._sat_out = (0, 0)  # the last exchange in which it has said so: epoch and number

    @property
    @led
    def epoch(self) -> int:
        """Number of the epoch that this region has joined (`membership.rendezvous`), from 1."""
        return self._context.heartbeat.own.epoch

    # -- exchanges ----------------------------------------------------------------------------

    @led
    def start(
        self,
        key: str,
        arrays: dict[str, jax.Array | np.ndarray],
        *,
        takes_part: bool = True,
        members: tuple[int, ...] | None = None,
        terms: Mapping[str, Any] | None = None,
        reduction: Slicing | None = None,
        early: str | None = None,
        patience_s: float = 0.0,
        joins: bool = True,
    ) -> None:
        """Begin an exchange; returns at once.

        Args:
          key: the same in every region of the group, new in every exchange of the run.
          arrays: `[1, ...]`, of this region, whole in its first process (`mesh.arrays.whole`);
            must not be donated or written to before `finish`.
          takes_part: False announces absence; the arrays then only tell the shapes.
          members: the group that exchanges; None = all regions.
          terms: what must be the same in all regions that take part, whole numbers and small uint32
            arrays. A region that does not name a term agrees to any value of it.
          reduction: how the arrays are reduced in slices; None = everyone gets those of all.
          early: key that `send_early` was given: its arrays belong to this payload, and whoever is
            counted is counted with both. Not with `reduction`.
          patience_s: wait so many seconds longer than usual for the others.
          joins: False = only take what the others exchange, once they have; the arrays then only
            tell the shapes.

        Raises:
          ValueError: lists what is wrong with the arguments.
        """
        self._context.heartbeat.check()
        given = {"takes_part": takes_part and joins, "joins": joins, "terms": terms or {}}
        given["patience_s"] = patience_s
        request = self._make_request(key, members, arrays, reduction, **given)
        sent = None
        if early is not None:
            sent = self._early.get(early)
            if sent is None or reduction is not None or takes_part > sent.request.takes_part:
                raise ValueError(
                    f"early={early!r} of exchange {key!r}: give a key that send_early was given, "
                    "for a region that takes part here, and no reduction"
                )
            del self._early[early]
            sent.take()
        if joins:
            begin_copies(arrays)
        own = self._context.heartbeat.own
        if joins and (not own.awaited or own.wants):
            self._context.heartbeat.update(awaited=True, wants=False)
        self._open[key] = self._begin(request, sent)

    @led
    def send_early(
        self,
        key: str,
        arrays: dict[str, jax.Array | np.ndarray],
        *,
        members: tuple[int, ...] | None = None,
        step: int = 0,
        takes_part: bool = True,
    ) -> None:
        """Send arrays before the exchange that they belong to (`start`); returns at once.

        Those that the group sends so are fetched meanwhile. Nobody waits, and nothing is agreed on
        before the exchange.

        Args:
          key: the same in every region of the group, and no key of `start`.
          arrays, members: as in `start`.
          step: the inner step, for `FaultHooks`.
          takes_part: False publishes nothing; the arrays then only tell the shapes.

        Raises:
          ValueError: lists what is wrong with the arguments.
        """
        self._context.heartbeat.check()
        given = {"takes_part": takes_part, "terms": {"step": step}}
        request = self._make_request(key, members, arrays, **given)
        if takes_part:
            begin_copies(arrays)
        self._early[key] = made = EarlyPayload(self._context, request)
        made.begin()

    @led
    def drop_early(self) -> None:
        """Stop sending what no exchange has taken, and let go of it."""
        for one in self._early.values():
            one.cancel()
            self._payload_gc.dropped(one.published)
        self._early = {}

    @led
    def ready(self, key: str) -> bool:
        """Whether `finish` would return, or raise, without waiting."""
        return self._open[key].outcome.done()

    @led
    def keep_more(self, times: int) -> None:
        """Keep the payloads of so many times as many exchanges: a round has as many."""
        self._payload_gc.keep *= times

    @led
    def reachable(self) -> bool:
        """Whether the store can be used; waits `dead_after_s` for one that has just gone away."""
        return self._context.heartbeat.store_answers(self._stops)

    def stop_when(self, stops: Callable[[], bool]) -> None:
        """Ask `stops` in every wait of the training loop whether to wait no longer, for now.

        `Engine.run` then returns the state within that step, and goes on with it at its next call.
        `Engine.step` makes its step all the same: where `stops` still holds, this region counts as
        absent in the step before.
        """
        self._stops = stops

    @led
    def stopped(self) -> bool:
        """Whether to wait no longer (`stop_when`)."""
        return self._stops()

    @led
    def arrives(self, keys: Sequence[str], answers: AnchorVersions | None = None) -> bool | None:
        """Wait until `finish` of all these would not wait.

        Args:
          answers: meanwhile `answer` newcomers with these, and wait no longer once this region owes
            one a state. None = do not.

        Returns:
          False: the store is away, or the wait was `stopped`. None: a state is owed; call it again.
        """
        exchanges, owed = [self._wait_for(key) for key in keys], False
        for one in exchanges:
            began = time.monotonic()
            while not (one.outcome.done() or owed or self._stops()) and self.reachable():
                wait([one.outcome], timeout=self._context.timing.beat_s / 4)
                owed = answers is not None and self.answer(answers)
            one.waited += time.monotonic() - began
        here = all(one.outcome.done() for one in exchanges)
        if owed and not here:
            return None
        if not here:
            for one in exchanges:
                one.due.end()
        return here

    @led
    def finish(self, key: str) -> Arrived:
        """Wait until the commit record and all its payloads are here.

        Raises:
          Rejected: a region's payload has other shapes than `start` got.
          Lost: a payload that was agreed on is gone with all who had it.
          Parted: this region's terms do not hold, or no region's do.
        """
        began = time.monotonic()
        one = self._wait_for(key)
        by_region = one.outcome.result()
        del self._open[key]
        # Here, where exchanges come in the order of the loop: they may end at the same time.
        self._note_counted(one.request, one.commit)
        self._tell_of_absent(one.request, one.commit)
        waited = one.waited + time.monotonic() - began
        ours, times = one.commit.admits(*self._context.heartbeat.job), (one.seconds, waited)
        return arrange(by_region, one.shapes, self.count, ours, one.reduced, *times)

    @led
    def never_counted(self, sends: int) -> bool:
        """Whether nothing counted of the last three payloads, or of all where there were fewer.

        Args:
          sends: of the run so far. Of fewer payloads, as after a restart, nothing follows.
        """
        return len(self._counted) == min(sends, RUNNING) > 0 and not any(self._counted)

    @led
    def agreed_terms(self, key: str) -> dict[int, Terms] | None:
        """Terms by region in the commit record of an exchange of all regions; None = no record.

        Waits while the store is away.

        Raises:
          RuntimeError: the exchange was closed meanwhile.
        """
        context = self._context
        read = functools.partial(context.commit_log.committed, self._of_all(key))
        commit = until_answered(context, f"exchange {key!r}", read)
        return None if commit is None else dict(commit.terms)

    @led
    def sent_before(self) -> int:
        """Inner step of the newest send that an earlier job in this region's place announced.

        An absence counts, too. Of exchanges of all regions, in this epoch, whose announcements were
        not removed; 0 = there is none.
        Waits while the store is away.

        Raises:
          RuntimeError: the exchange was closed meanwhile.
        """
        own = self._context.heartbeat.own
        look = functools.partial(self._context.commit_log.left, self.region)
        ours = until_answered(self._context, "reading what was sent before", look)
        sent = [
            int(said.terms.get("step", 0))
            for (name, job), said in ours.items()
            if said is not None and job.incarnation < own.incarnation
            if name.startswith(f"{own.epoch}/") and "@" not in name
        ]
        return max(sent, default=0)

    @led
    def fetch_ahead(self, first: int, count: int, missed: int = 0) -> int:
        """Read what came of exchanges of all regions that went on without us, all at once.

        `start` and `finish` then find it here: their number costs no round trips to the store.
        Records and payloads are kept until `forget_ahead`. What cannot be read is read later.

        Where all regions have missed an exchange, no record says so yet. This region announces at
        once that it has no part in those that it missed. The last one to do so finds that nobody
        has, and writes the empty records.

        Args:
          first: number of the first exchange, which is its key.
          count: how many at most.
          missed: in how many of them, from the first on, this region certainly has no part.

        Returns:
          How many, from the first on, have been read.
        """
        context, until = self._context, first + missed
        jobs = context.heartbeat.jobs(range(self.count))
        sizes: dict[str, int] = {}
        known, closed = first, -1
        try:
            while known < first + count:
                numbers = range(known, min(known + AT_ONCE, first + count))
                names = [self._of_all(str(n)) for n in numbers]
                landed = context.commit_log.read_ahead(names, jobs)
                known += len(landed)
                if not landed and known < until:
                    self._sit_out(range(known, until))
                    if closed != known and self._end_missed(numbers[: until - known]):
                        closed = known
                        continue  # their records can be read now
                averages = context.commit_log.read_ahead(list(map(averages_of, landed)), jobs)
                for commit in [*landed.values(), *averages.values()]:
                    named = [one.payload for one in commit.admitted.values()]
                    sizes |= {payload.digest: payload.nbytes for payload in named}
                if not landed:
                    break
            while sizes and sum(sizes.values()) > _MOST_AHEAD:
                sizes.popitem()  # the last ones are read when it is their turn
            if sizes:
                context.transport.get_ahead(sizes)
        except StoreUnavailable as error:
            log.info("what the others have landed is read one by one: %s", error)
        return known - first

    def _sit_out(self, numbers: range) -> None:
        """Announce that this region has no part in these exchanges of all regions, once in each.

        An announcement that it has made stands. No terms: the region may agree with everyone.
        """
        commit_log, job = self._context.commit_log, self._context.heartbeat.job
        epoch, (told_epoch, told) = self._context.heartbeat.own.epoch, self._sat_out
        new = numbers if epoch > told_epoch else range(max(numbers.start, told + 1), numbers.stop)
        if new:
            names = [self._of_all(str(n)) for n in new]
            at_once(lambda name: commit_log.announce(name, job, Announcement(None)), names)
            self._sat_out = epoch, new[-1]

    def _end_missed(self, numbers: range) -> bool:
        """Agree on the first of these exchanges in which nobody has a part, if any.

        Nobody has a part once all that are waited for have announced so: then no other record can
        come, whoever writes it.
        """
        context = self._context
        ended: dict[str, AgreedRound] = {}
        jobs = context.heartbeat.jobs(range(self.count))
        names = [self._of_all(str(n)) for n in numbers]
        said = context.commit_log.all_announced(names, jobs)
        for number, name in zip(numbers, names, strict=True):
            request = self._make_request(f"{number}", None, {})
            round = AgreedRound(context, request)
            round.announcements |= said[name]
            taken = any(one.payload is not None for one in said[name].values())
            if taken or not all(map(round.is_final, request.members)):
                break
            ended[name] = round
        at_once(lambda name: ended[name].propose(), ended)
        return bool(ended)

    @led
    def forget_ahead(self) -> None:
        """Let go of what `fetch_ahead` has read."""
        self._context.commit_log.forget_ahead()
        self._context.transport.get_ahead({})

    @led
    def passed_over(self, key: str) -> bool:
        """Whether others have confirmed an exchange of all regions without this region's payload.

        False once there is a commit record.

        Raises:
          StoreUnavailable: try again later.
        """
        context, name = self._context, self._of_all(key)
        others = context.heartbeat.jobs(context.heartbeat.living() - {self.region})
        held = context.commit_log.confirmed(name, [Job(r, i) for r, (i, *_) in others.items()])
        passed = any(self.region not in one for one in held.values())
        return passed and context.commit_log.committed(name) is None

    # -- rounds at a pace of one's own ----------------------------------------------------------

    def rounds(
        self, admission: Admission, most: int, overlap: int, like_K: Sequence[Like], first: int
    ) -> RoundExchange:
        """Begin to take part in rounds of regions at a pace of their own; see `RoundExchange`.

        Args:
          most: regions that a round admits, those that reported first.
          overlap: tau.
          like_K: shapes of what is sent of each fragment.
          first: the first round that has not landed here.
        """
        rounds = RoundExchange(admission, most, overlap, like_K, first)
        self._begin_rounds(rounds)
        return rounds

    @led
    def _begin_rounds(self, rounds: RoundExchange) -> None:
        self._context.heartbeat.check()
        rounds.begin(self._context, self._payload_gc)

    # -- states -------------------------------------------------------------------------------

    @led
    def answer(self, versions: AnchorVersions) -> bool:
        """Tell regions that ask for a state which anchors we have had.

        Returns:
          whether this region is to give a state (`StateTransfer.owed`).
        """
        self.state_transfer.tell_anchors(versions)
        return self.state_transfer.owed()

    @led
    def give_state(
        self, step: int, arrays: dict[str, np.ndarray], document: dict[str, Any]
    ) -> None:
        """Publish a state, on a thread of its own."""
        self.state_transfer.give_soon(step, arrays, document)

    # -- helpers ---------------------------------------------------------------------------------

    def _wait_for(self, key: str) -> AgreedRound:
        """The exchange of this key, which is told that the loop waits for it."""
        found = self._open[key]
        found.due.begin(self._context.heartbeat.clock_s)
        return found

    def _of_all(self, key: str) -> str:
        """The name of an exchange of all regions in the store."""
        everyone = tuple(range(self.count))
        return name_of(self._context.heartbeat.own.epoch, key, everyone, self.count)

    def _make_request(
        self,
        key: str,
        members: tuple[int, ...] | None,
        arrays: Mapping[str, Any],
        reduction: Slicing | None = None,
        **rest: Any,
    ) -> ExchangeRequest:
        group = tuple(range(self.count)) if members is None else tuple(sorted(members))
        epoch = self._context.heartbeat.own.epoch
        wrong = problems(key, group, self.region, self.count)
        if not epoch:
            wrong.append("this region has not joined the run: call join() first")
        if key in self._open or key in self._early:
            wrong.append(f"key {key!r} was started and not finished; every exchange needs its own")
        if wrong:
            raise ValueError("; ".join(wrong))
        shapes = wire.without_region(arrays) if reduction is None else reduction.rest
        rest["like"] = dict.fromkeys(group, shapes)
        rest["awaited"] = self._context.wait_list.awaited
        name = name_of(epoch, key, group, self.count)
        return ExchangeRequest(key, name, group, dict(arrays), reduction=reduction, **rest)

    def _begin(self, request: ExchangeRequest, early: EarlyPayload | None = None) -> AgreedRound:
        """Begin an exchange in the background."""
        number = self._payload_gc.begin(request.key)
        if request.reduction is None:
            exchange = AgreedRound(self._context, request, early)
        else:
            exchange = TwoShotExchange(self._context, request)
        request = exchange.request  # without the device's copies, which are not needed for long

        def run() -> None:
            try:
                result = exchange.result()
                # First: a region that closes after `finish` stays until all have its payload.
                self._payload_gc.done(request.key, exchange.published)
            except BaseException as error:  # it is for `finish` to raise, on the caller's thread
                exchange.outcome.set_exception(error)
            else:
                exchange.outcome.set_result(result)
                self._done(number, request, exchange.commit)

        self._context.background.begin(request.name, run, exchange.news.set)
        return exchange

    def _done(self, number: int, request: ExchangeRequest, commit: Commit) -> None:
        """Called on the thread of an exchange when `finish` may have returned."""
        self._context.wait_list.note(number, request.members, request.joins, commit)
        self._payload_gc.sweep()
        self.state_transfer.sweep()

    def _note_counted(self, request: ExchangeRequest, commit: Commit) -> None:
        """Note whether the others counted this region; warns where so many in a row have not."""
        if not (request.joins and request.takes_part):
            return
        before = len(self._counted) == RUNNING and not any(self._counted)
        self._counted.append(commit.admits(*self._context.heartbeat.job))
        if len(self._counted) == RUNNING and not any(self._counted) and not before:
            log.warning(
                "this region was not counted in %d exchanges running, and trains on: the others "
                "get nothing that it learns. See whether they reach its address, and whether its "
                "steps or its link are too slow for them",
                RUNNING,
            )

    def _tell_of_absent(self, request: ExchangeRequest, commit: Commit) -> None:
        """Warn of regions that ended early, died, or are too late, at the first exchange without.

        Of an exchange without arrays nobody's progress is missed.
        """
        if not request.joins or not request.takes_part:
            return
        missed = set(request.members) - commit.present.keys()
        if not commit.saw(*self._context.heartbeat.job):
            missed |= {self.region}
        steps = {one["step"] for one in commit.terms.values() if "step" in one}
        what = f"the exchange after step {max(steps)}" if steps else f"exchange {request.key!r}"
        for region in sorted(missed - self._missed):
            if region == self.region:
                log.warning("%s went on without this region: its payload does not count", what)
            else:
                log.warning(
                    "%s goes on without region %d, which has ended, died or is late: the others' "
                    "parameters get nothing that it learns from now on",
                    what,
                    region,
                )
        self._missed = (self._missed - set(request.members)) | missed
