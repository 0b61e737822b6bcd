"""`Membership`: how a region joins a run, is known to the others, pauses, and leaves.

`join` registers (`register`) and waits for the others (`rendezvous`): with all regions at the
beginning, or alone into a run that goes on. It raises `TimeoutError` when too few regions came.
"""

from __future__ import annotations

import atexit
import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from lowcomm_jax.mesh.leader import leader, led
from lowcomm_jax.rounds.payloads import PayloadGC
from lowcomm_jax.rounds.state_transfer import (
    State,
    StateTransfer,
    leave_result,
    result_of,
    take_result,
)
from lowcomm_jax.store.context import ExchangeContext, check_open, until_answered
from lowcomm_jax.store.errors import Rejected, StoreUnavailable, Unreadable
from lowcomm_jax.store.records import (
    ANY_FORMAT,
    FORMAT,
    RUN,
    Beat,
    Epoch,
    Run,
    RunOfAnyFormat,
)
from lowcomm_jax.store.terms import Heal

_JOINING = "joining the run"
_RESULT_WITHIN_S = 60.0

_LOOKS_AROUND_S = 5.0
"""Seconds of waiting after which a region looks whether the others wait in another run."""

_NAMED = 3
"""Most other runs, and most settings of one, that are told."""

T = TypeVar("T")

log = logging.getLogger(__name__)


class Membership:
    """The part of a `RemoteExchange` that is about regions, not about payloads.

    Attributes:
      region: number of this one, from 0.
      count: number of regions.
      heal: which anchor is kept where anchors differ.
      lingers: whether others can get the payloads of this job only while it runs.
      state_transfer: gives and takes states; in the first process alone, so callers ask it within a
        decision of the leader.
    """

    def __init__(
        self,
        region: int,
        count: int,
        heal: Heal,
        make: Callable[[], ExchangeContext],
        keep: int | None,
    ):
        """
        Args:
          make: makes what all exchanges share, in the first process.
          keep: see `PayloadGC`.

        Raises:
          ValueError: the processes were given different regions; and whatever `make` raises.
        """
        self.region, self.count, self.heal = region, count, heal
        given = leader().everyones("region", (region, count, heal))
        if len(set(given)) > 1:
            raise ValueError(
                f"the processes of this job were given (region, count, heal) {given}: give all of "
                "them the same"
            )
        self._stays_until: float | None = None  # None = it has stayed for nobody so far
        self.lingers: bool = self._open_with(make, keep)

    @led
    def _open_with(self, make: Callable[[], ExchangeContext], keep: int | None) -> bool:
        """Make what the first process alone has; returns whether its transport lingers."""
        self._context = context = make()
        self._payload_gc = PayloadGC(context, keep)
        self.state_transfer = StateTransfer(context)
        if leader().count > 1:
            leader().on_failure(self.fail)
        return context.transport.lingers

    @led
    def join(self, wait_s: float, step: int = 0) -> None:
        """Register, begin to beat, and wait until all regions of a new run are there.

        If the run goes on, this region joins it at once. If it was begun and has nobody left, it
        begins anew: with all regions, or after `wait_s` with those who are there. Keys can then be
        used again. A region that is behind the furthest of them joins their run as a latecomer. So
        does one that finds nobody, but the result that they have left (`result`).

        Args:
          step: of the state that this region brings; all that was due up to there is done.

        Raises:
          ValueError: the run was begun with another secret or with other settings, or the store
            lets two jobs create one key.
          TimeoutError: not all regions of a new run came in time, or only fresh ones came back.
          StoreUnavailable: the store does not answer all that time.
        """
        atexit.register(self._end)
        context, until = self._context, time.monotonic() + wait_s
        for act in (
            context.store.require_create_only,
            functools.partial(register, context),
            self._payload_gc.adopt,
        ):
            until_answered(context, _JOINING, act, until)
        context.wait_list.roster = rendezvous(context, until, step)

    @property
    @led
    def awaited(self) -> bool:
        """Whether the others wait for this region's payloads; not while it joins late."""
        return self._context.heartbeat.own.awaited

    @led
    def want_state(self) -> None:
        """Ask the others for a state; they do not wait for our payloads until we `come_in`."""
        self.state_transfer.forget_anchors()
        self._context.heartbeat.update(wants=True, awaited=False)

    @led
    def come_in(self) -> None:
        """Let the others wait for our payloads from now on; returns when they know."""
        self._context.heartbeat.update(awaited=True, wants=False)
        self.wait_for_beats(times=2)

    @led
    def wait_for_beats(self, times: int = 1) -> None:
        """See `Heartbeat.wait_for_beats`: then every region has told its step anew."""
        self._context.heartbeat.wait_for_beats(times)

    @led
    def steps(self) -> dict[int, int]:
        """Inner steps that the living regions have made, as they told."""
        return {r: max(beat.step, beat.trained) for r, beat in self._beats().items()}

    @led
    def frontier(self, done: bool = False) -> int:
        """Inner steps of the furthest other region that trains with the others; 0 if none does.

        Args:
          done: only those up to which all that was due is done; a region that was cut off has made
            more.
        """
        donors, beats = self.state_transfer.donors(), self._beats()
        there = [beats[r] for r in donors & beats.keys()]
        return max((b.step if done else max(b.step, b.trained) for b in there), default=0)

    def _beats(self) -> dict[int, Beat]:
        living = sorted(self._context.heartbeat.living())  # first: others may come meanwhile
        latest = self._context.heartbeat.latest()
        return {region: latest[region] for region in living}

    @led
    def beat(self, step: int | None = None, trained: int | None = None) -> None:
        """Tell the others how far we are, with the next heartbeat; None = no further than before.

        Args:
          step: of our last send or landing.
          trained: inner steps that we have made.
        """
        told = {"step": step, "trained": trained}
        known = {name: value for name, value in told.items() if value is not None}
        self._context.heartbeat.update(at_once=False, **known)

    @led
    def agree(self, name: str, proposal: dict[str, Any], wait_s: float = 0.0) -> dict[str, Any]:
        """The first proposal (small JSON) of any region under this name, in this epoch.

        Args:
          wait_s: seconds for which a store that does not answer is asked again.

        Raises:
          StoreUnavailable: try again later.
        """
        context, until = self._context, time.monotonic() + wait_s
        key = f"{context.heartbeat.own.epoch}/{name}"
        act = functools.partial(context.commit_log.agree, key, proposal)
        return until_answered(context, f"agreement {name!r}", act, until)

    @led
    def result(self) -> State | None:
        """The state that the run has ended with, if this region came after that; else None.

        Raises:
          Rejected: it is damaged.
        """
        if self.awaited:
            return None
        until = time.monotonic() + _RESULT_WITHIN_S
        act = functools.partial(take_result, self._context)
        return until_answered(self._context, "taking the result", act, until)

    @led
    def misses(self, step: int) -> bool:
        """Whether the run ends at this step without some region, and this one is to say how.

        That is so where a region neither trains with us nor has left at the end, and no lower one
        does. One that lives and is only coming in (it meets the others, or compiles) misses it. So
        does one that has paused, and one that could get payloads of ours only while this job runs,
        and lacks some where this job does not stay for it, or no longer (`is_needed`).
        """
        heartbeat, comes = self._context.heartbeat, self.state_transfer.asking().keys()
        if self._stays_until is None or time.monotonic() >= self._stays_until:
            comes |= self._lacking()
        here = {r: b for r, b in self._beats().items() if b.awaited and not b.paused}
        ours = {r for r, b in here.items() if b.epoch == heartbeat.own.epoch}
        there = ours - comes | {self.region}
        left = {r: b for r, b in heartbeat.latest().items() if b.leaving}
        ended = {r for r, b in left.items() if max(b.step, b.trained) >= step}
        missing = set(range(self.count)) - there - ended
        return bool(missing) and self.region == min(there)

    @led
    def is_needed(self, until: float) -> bool:
        """Whether a living region asks for a state, or lacks payloads that go with this job.

        Args:
          until: then it is no more, nor does `close` wait for anybody; by `time.monotonic`.
        """
        self._stays_until = until
        needed = self.state_transfer.asking() or self._fetching()
        return bool(needed) and time.monotonic() < until

    def _fetching(self) -> bool:
        """Whether one that lacks payloads of ours lives, and has not paused."""
        beats = self._beats()
        return any(region in beats and not beats[region].paused for region in self._lacking())

    def _lacking(self) -> set[int]:
        """Regions that can get payloads of ours only while this job runs, and lack some."""
        return self._payload_gc.lacking() if self._context.transport.lingers else set()

    @led
    def leave_result(self, state: State) -> None:
        """Leave the state that the run has ended with to the regions that are not there.

        Raises:
          StoreUnavailable: the store does not answer for a while.
        """
        until = time.monotonic() + _RESULT_WITHIN_S
        act = functools.partial(leave_result, self._context, state)
        until_answered(self._context, "leaving the result", act, until)

    @led
    def counts(self) -> dict[str, int]:
        """Since the start: "sent", "received" (payload bytes), "store_written", "store_read" (all
        bytes through the store), "rejected_record", "rejected_damaged", "rejected_content",
        "rejected_state", "outage"; what never happened is absent.
        """
        return self._context.counter.read()

    @led
    def pause(self, linger_s: float = 30.0) -> None:
        """End the exchanges under way without an outcome, before all regions stop for a while.

        So no region is left out because it only stops: exchanges under way are started again when
        the run continues. Payloads can be had until all living regions pause, `linger_s` at most.
        """
        heartbeat = self._context.heartbeat
        self._context.halted.set()
        self._context.background.join(leaves=False)
        heartbeat.update(paused=True)
        self._linger(linger_s, lambda: all(beat.paused for beat in self._beats().values()))

    def fail(self, error: Exception) -> None:
        """Let everything that waits here, and every later call, raise this error."""
        self._context.halted.set()  # this region can send nothing any more
        self._context.heartbeat.fail(error)

    @led
    def close(self, linger_s: float = 30.0) -> None:
        """Leave the run and end all exchanges under way.

        Where others can only get payloads while this region is there, it stays until all living
        ones that have not paused have them: for at most `linger_s`, and no longer than `is_needed`
        was told. A state that is being given has half a minute left; what is not written then is
        dropped, and another region gives one.
        """
        if not self._context.halted.is_set():
            self._linger(linger_s, lambda: not self._fetching())
        self._end()

    def _linger(self, seconds: float, done: Callable[[], bool]) -> None:
        until = time.monotonic() + seconds
        if self._stays_until is not None:
            until = min(until, self._stays_until)
        while time.monotonic() < until and not done():
            time.sleep(self._context.timing.beat_s / 4)

    def _end(self) -> None:
        """Stop all threads: one inside a library when the process ends would bring it down."""
        atexit.unregister(self._end)
        context = self._context
        context.closing.set()
        context.background.join()
        told = context.heartbeat.stop()
        context.store.close()
        if not told:
            log.warning(
                "the store does not answer: the others are not told that region %d leaves",
                self.region,
            )
            context.heartbeat.stop(leaving=False)
        context.background.join()  # somebody may have waited for a store that answers no more
        context.transport.close()


def register(context: ExchangeContext) -> None:
    """Write the run's record, or check that ours is the run that is recorded there.

    Raises:
      ValueError: the record was signed with another secret, or describes another run.
      StoreUnavailable: the store does not answer.
    """
    slots, kind = context.slots, context.transport.name
    given = context.run_id, context.count, kind, context.heal, context.identity
    ours = Run(FORMAT, *given)
    place = f"run {context.run_id!r} at {context.store.root}"
    context.store.create(RUN, slots.seal.close(RUN, ours, ANY_FORMAT))
    data = context.store.read(RUN)
    if data is None:  # the store has gone away, as a folder that is unmounted
        raise StoreUnavailable(f"{context.store.root}: the run's record {RUN!r} is not there")
    stands = slots.opened(RUN, data, RunOfAnyFormat, ANY_FORMAT)
    if stands is None:
        raise ValueError(f"{place} was begun with another secret: use that one, or another run id")
    if stands.format != FORMAT:
        raise ValueError(
            f"{place} was begun by a version of this program that writes format {stands.format}, "
            f"this one writes {FORMAT}: use the same version everywhere, or another run id"
        )
    record = slots.seal.open(RUN, data, Run, ANY_FORMAT)
    wrong = [
        f"{name} is {there!r} there, {here!r} here"
        for name, there, here in _compared(record, ours)
        if there != here
    ]
    if wrong:
        raise ValueError(f"{place}: " + "; ".join(wrong))
    context.store.anchor(RUN)


def _compared(record: Run, ours: Run) -> Iterator[tuple[str, Any, Any]]:
    """(name, value there, value here) of all that two records of a run hold."""
    for name in ("run", "count", "transport", "heal"):
        yield name, getattr(record, name), getattr(ours, name)
    for name in sorted(record.identity.keys() | ours.identity):
        yield name, record.identity.get(name), ours.identity.get(name)


def rendezvous(context: ExchangeContext, until: float, step: int) -> dict[int, int]:
    """Begin to beat, and wait for the others.

    Regions that begin together agree on a roster by a create-only record: an epoch of the run. A
    region that is not in the roster joins a run that goes on. The others do not wait for its
    payloads before its first one.

    When no region is left, those that come back begin a new epoch. They may have gone back to a
    checkpoint, and must not land what was agreed on since. The roster of that epoch are the
    furthest of them: payloads that are gone could not bring the others up to their step. Where the
    epoch's result was left (`leave_result`), nothing is begun: they come in late, and take it.

    Returns:
      the roster: incarnation of the regions that began the epoch.

    Raises:
      TimeoutError: until then, by `time.monotonic`, not all regions of a new run were there, or of
        an old run only regions without a checkpoint.
      StoreUnavailable: the store did not answer.
      RuntimeError: the exchange was closed meanwhile.
    """

    def ask(act: Callable[[], T]) -> T:
        return until_answered(context, _JOINING, act, until)

    heartbeat, looks_around_s = context.heartbeat, time.monotonic() + _LOOKS_AROUND_S
    context.transport.start()
    heartbeat.update(step=step)
    _, roster = ask(lambda: _newest_epoch(context))
    above = roster.get(context.region, 0)
    ask(lambda: heartbeat.start(lambda: check_open(context, _JOINING), above))
    while True:
        check_open(context, _JOINING)
        living, latest = heartbeat.living(), heartbeat.latest()
        epoch, roster = ask(lambda: _newest_epoch(context))
        began_it = roster.get(context.region) == heartbeat.own.incarnation
        others = [latest[region] for region in living - {context.region}]
        goes_on = began_it or _run_goes_on(others, epoch)
        if goes_on or (epoch and ask(lambda n=epoch: result_of(context, n)) is not None):
            heartbeat.update(epoch=epoch, awaited=began_it)
            heartbeat.refresh()
            return roster
        # Regions that have just begun it may not have told so yet.
        begun = any(latest[r].incarnation == roster[r] for r in living & roster.keys())
        late = time.monotonic() >= until and not begun
        # Without regions whose epoch was ended by others: they will see that, and join again.
        coming = {region for region in living if not latest[region].epoch}
        if (len(coming) == context.count and not begun) or (late and epoch):
            _check_not_fresh(context, coming)
            began = Epoch(_furthest(latest, coming))
            ask(lambda n=epoch, e=began: context.slots.create(_epoch(n + 1), e))
            continue
        if late:
            raise TimeoutError(_why_not_in(context, living, epoch))
        if time.monotonic() >= looks_around_s:
            looks_around_s = math.inf
            if others := ask(lambda: _differing(context)):
                log.warning("region %d still waits for the others; %s", context.region, others)
        context.closing.wait(context.timing.beat_s / 4)


def _run_goes_on(others: Iterable[Beat], epoch: int) -> bool:
    """Whether one of them trains; a region that is joining itself has no state to give."""
    return any(b.epoch == epoch > 0 and b.awaited and not b.wants and not b.paused for b in others)


def _furthest(latest: Mapping[int, Beat], coming: set[int]) -> dict[int, int]:
    """A roster: incarnations of the regions with the highest step."""
    step = max(latest[region].step for region in coming)
    return {r: latest[r].incarnation for r in sorted(coming) if latest[r].step == step}


def _why_not_in(context: ExchangeContext, living: set[int], epoch: int) -> str:
    """Why a region that waited long enough cannot join."""
    latest = context.heartbeat.latest()
    ahead = sorted(region for region in living if latest[region].epoch > epoch)
    if ahead:
        return (
            f"regions {ahead} of run {context.run_id!r} train, but there is no record of when it "
            "began (epoch/): it was removed; stop them, and begin again from the checkpoints in "
            "another rendezvous"
        )
    missing = sorted(set(range(context.count)) - living)
    try:
        others = _differing(context)
    except StoreUnavailable:
        others = ""  # the heartbeat reports it
    also = f"; {others}" if others else ""
    return f"regions {missing} of run {context.run_id!r} were not there in time{also}"


def _check_not_fresh(context: ExchangeContext, coming: set[int]) -> None:
    """Regions without a checkpoint must not begin a run anew while others may have one.

    Raises:
      TimeoutError: they would.
    """
    latest = context.heartbeat.latest()
    further = {r: beat.step for r, beat in latest.items() if r not in coming and beat.step}
    if further and not any(latest[region].step for region in coming):
        raise TimeoutError(
            f"regions {sorted(coming)} have no checkpoint of run {context.run_id!r}, and those "
            f"that may have one, last seen at steps {further}, were not there in time: start one "
            "of them, or begin again in another rendezvous"
        )


def _newest_epoch(context: ExchangeContext) -> tuple[int, dict[int, int]]:
    """(the newest epoch, its roster); 0 = there is none."""
    for slot, (number,) in reversed(context.slots.numbered("epoch/", 1).items()):
        found = context.slots.first(slot, Epoch)
        if found is not None:
            return number, found.roster
    return 0, {}


def _epoch(number: int) -> str:
    return f"epoch/{number}"


def _differing(context: ExchangeContext) -> str:
    """What the other runs in the folder differ in, the most alike first; "" = none can be read.

    A run's id follows from its settings. So a job with another seed is not refused: it waits, too,
    in another run. The runs' records say by name what they stand for.

    Raises:
      StoreUnavailable: the store does not answer.
    """
    found = []
    for run_id, data in context.store.beside(RUN).items():
        try:
            record = context.slots.seal.of(run_id).open(RUN, data, Run, ANY_FORMAT)
        except (Rejected, Unreadable):
            continue  # of another secret, or of another format
        if differences := _between(record.identity, context.identity):
            found.append(differences)
    told = [_shortened(one, "; ") for one in sorted(found, key=len)]
    if not told:
        return ""
    runs = _shortened([f"a run whose config differs in {one}" for one in told], ", and ")
    return f"the folder also holds {runs}"


def _between(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Each setting in which two runs differ; none where one of them has no identity."""
    if not (there and here):
        return []
    return [
        f"{name}: {there.get(name, 'nothing')} instead of {here.get(name, 'nothing')}"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]


def _shortened(parts: list[str], between: str) -> str:
    more = len(parts) - _NAMED
    return between.join(parts[:_NAMED]) + (f"{between}{more} more" if more > 0 else "")
