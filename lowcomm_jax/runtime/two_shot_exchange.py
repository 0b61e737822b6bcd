"""One exchange in two halves: slices to the regions that average them, averages to everyone.

Each of R regions then sends 2 (R - 1) / R payloads, where gathering them whole takes R - 1.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from lowcomm_jax.runtime import payloads
from lowcomm_jax.runtime.commits import Commit, CommitLog
from lowcomm_jax.runtime.context import ExchangeContext
from lowcomm_jax.runtime.errors import Missing, Rejected
from lowcomm_jax.runtime.fetch import Fetch, PayloadPiece
from lowcomm_jax.runtime.request import ExchangeRequest, Gathered
from lowcomm_jax.runtime.whole_exchange import WholeExchange
from lowcomm_jax.runtime.wire import Arrays, one_slice, owners, side_by_side


class TwoShotExchange:
    """Runs one exchange whose payloads are reduced in slices; to be used like a `Gathering`.

    In a first exchange slice s of everyone's payload goes to region s, and to everyone what all
    need beside it. Its commit record says who takes part, and who is there to average: a slice
    whose region is not falls to another. The averages are gathered in a second exchange.

    Where a region is lost in between, that second record lacks its slices, for everyone alike.
    Then those who are left gather whole payloads in a third exchange, and average all slices
    themselves, so that the lost region counts in no slice, and what comes of it is the same, bit
    for bit, as if it had been left out from the beginning.
    """

    def __init__(
        self,
        office: ExchangeContext,
        request: ExchangeRequest,
        awaited: Callable[[int], bool],
        done: Callable,
    ):
        """See `Gathering`."""
        # The device's copies are for the first exchange alone, and not needed for long.
        self.request = dataclasses.replace(request, arrays={})
        self.outcome: Future[Gathered] = Future()
        self._office, self._awaited, self._done = office, awaited, done
        self._parts, self._like = request.reduction.parts, request.reduction.like
        self._first = self._gathering(request, awaited)
        self._gatherings = [self._first]
        self._fetches: list[Fetch] = []
        name = f"lowcomm-{request.name}-halves"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def begin(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def published(self) -> dict[str, dict[int, list[str]]]:
        """See `Gathering.published`."""
        return {name: x for one in self._gatherings for name, x in one.published.items()}

    @property
    def running(self) -> bool:
        """Whether any of its threads still is."""
        parts = (*self._gatherings, *self._fetches)
        return self._thread.is_alive() or any(part.running for part in parts)

    def join(self) -> None:
        """Wait for all threads, when the exchange is over or closing."""
        self._thread.join()
        for part in (*self._gatherings, *self._fetches):
            part.join()

    def _run(self) -> None:
        try:
            gathered = self._exchange()
        except BaseException as error:  # it is for `finish` to raise, on the caller's thread
            self.outcome.set_exception(error)
        else:
            seconds = time.monotonic() - self._first.began
            self.outcome.set_result(dataclasses.replace(gathered, seconds=seconds))
        finally:
            for fetch in self._fetches:
                fetch.cancel()
        self._done(self)

    def _exchange(self) -> Gathered:
        self._first.begin()
        found = self._first.outcome.result()
        if not found.commit.payloads:
            return dataclasses.replace(found, reduced=self._average_all({}, {}))
        averages = self._second(found)
        if averages is not None:
            return dataclasses.replace(found, reduced=averages)
        return self._whole(found.commit)

    def _gathering(self, request: ExchangeRequest, awaited: Callable[[int], bool]) -> WholeExchange:
        return WholeExchange(self._office, request, awaited, lambda _: None)

    def _next(self, suffix: str, awaited: Callable[[int], bool], **more) -> Gathered:
        """The outcome of an exchange that follows."""
        key, name = f"{self.request.key}/{suffix}", _following(self.request.name, suffix)
        changes = {"key": key, "name": name, "reduction": None, "terms": {}}
        changes |= {"follows": True, "patience_s": 0.0, **more}
        request = dataclasses.replace(self.request, **changes)
        self._gatherings.append(self._gathering(request, awaited))
        self._gatherings[-1].begin()
        return self._gatherings[-1].outcome.result()

    # -- second half --------------------------------------------------------------------------

    def _second(self, found: Gathered) -> Arrays | None:
        """All slices averaged, `[parts, ...]`; None = some were not."""
        commit, me = found.commit, self._office.region
        owner = owners(commit.present, self._parts)
        here = self.request.joins and me in commit.present
        ours = self._averages(found, [s for s in range(self._parts) if here and owner[s] == me])
        like = {region: {} for region in self.request.members}
        for s, region in enumerate(owner):
            like[region] |= {_label(s, name): shape for name, shape in self._like.items()}
        second = self._next(
            _AVERAGES, self._owes(commit), arrays=ours, takes_part=bool(ours), like=like
        )
        if not _complete(commit, second.commit):
            return None
        return {
            name: np.stack([second.arrays[r][_label(s, name)] for s, r in enumerate(owner)])
            for name in self._like
        }

    def _owes(self, commit: Commit) -> Callable[[int], bool]:
        """Tells whether a region can be expected to bring averages: it lives, as the same job."""
        beats, said = self._office.beats, self._first.heard.said

        def owes(region: int) -> bool:
            beat = beats.latest().get(region)
            if region not in commit.present or beat is None or beat.wants:
                return False
            same = region not in said or said[region].incarnation == beat.incarnation
            return same and region in beats.living(certain=False)

        return owes

    def _averages(self, found: Gathered, ours: list[int]) -> Arrays:
        """Of the slices that are ours, by label; none where a contribution cannot be had."""
        try:
            given = {s: self._contributions(found.commit, s) for s in ours}
        except (Missing, Rejected):
            return {}
        labelled = {}
        for s, slices in given.items():
            average = self._average(slices, found.arrays)
            labelled |= {_label(s, name): x for name, x in average.items()}
        return labelled

    def _contributions(self, commit: Commit, number: int) -> dict[int, Arrays]:
        """Everyone's slice of this number."""
        found, waiting = {}, {}
        for region, payload in commit.payloads.items():
            fetch = self._first.heard.fetches.get(region)
            if payload == self._first.heard.own:
                found[region] = one_slice(self._first.parcel.slices, number)
            elif region == self._office.region:
                raise Missing("a job that was here before us has sent it")
            elif number == self._office.region and fetch is not None and fetch.complete:
                found[region] = fetch.got[1]
            else:
                whole = PayloadPiece(
                    self.request.key, self.request.name, payload, None, [region], {}
                )
                piece = payloads.slice_piece(whole, self.request.reduction, number)
                waiting[region] = Fetch(self._office, region, [piece])
                self._fetches.append(waiting[region])
        return found | {r: fetch.first(self._first.check) for r, fetch in waiting.items()}

    # -- without the lost ---------------------------------------------------------------------

    def _whole(self, commit: Commit) -> Gathered:
        """Gather whole payloads, and average every slice."""

        def awaited(region: int) -> bool:
            return region in commit.present and self._awaited(region)

        found = self._next(_WHOLE, awaited, arrays=self._first.parcel.whole)
        split = {r: self.request.reduction.split(x) for r, x in found.arrays.items()}
        rest = {r: rest for r, (rest, _) in split.items()}
        averages = self._average_all({r: slices for r, (_, slices) in split.items()}, rest)
        return dataclasses.replace(found, arrays=rest, reduced=averages)

    def _average_all(self, slices: dict[int, Arrays], rest: dict[int, Arrays]) -> Arrays:
        averages = [
            self._average({r: one_slice(x, s) for r, x in slices.items()}, rest)
            for s in range(self._parts)
        ]
        return {name: np.stack([one[name] for one in averages]) for name in self._like}

    def _average(self, slices: dict[int, Arrays], rest: dict[int, Arrays]) -> Arrays:
        """Of one slice, by region; `rest`: what came beside it."""
        count, how = self._office.count, self.request.reduction
        rows = side_by_side(slices, count, how.like), side_by_side(rest, count, how.rest)
        return how.reduce(*rows, np.isin(np.arange(count), list(slices)))


_AVERAGES, _WHOLE = "averages", "whole"


def stands(board: CommitLog, request: ExchangeRequest) -> bool:
    """Whether an exchange is over for those who take part: its commit records stand."""
    first = board.standing(request.name)
    if first is None or request.reduction is None or not first.payloads:
        return first is not None
    second = board.standing(_following(request.name, _AVERAGES))
    if second is None or _complete(first, second):
        return second is not None
    return board.standing(_following(request.name, _WHOLE)) is not None


def _complete(first: Commit, second: Commit) -> bool:
    """Whether everyone who was there to average slices did so."""
    return second.payloads.keys() >= set(first.present)


def _following(name: str, suffix: str) -> str:
    return f"{name}@{suffix}"


def _label(number: int, name: str) -> str:
    return f"{number}/{name}"
