"""`TwoShotExchange`: slices go to the regions that average them, averages go to everyone.

Each of R regions then sends 2 (R - 1) / R payloads; an `AgreedRound` takes R - 1.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import msgspec
import numpy as np

from lowcomm_jax.rounds.agreed_round import AgreedRound
from lowcomm_jax.rounds.fetch import Fetch, slice_piece
from lowcomm_jax.rounds.payloads import Published
from lowcomm_jax.rounds.request import ExchangeRequest
from lowcomm_jax.store.commits import Job
from lowcomm_jax.store.context import ExchangeContext
from lowcomm_jax.store.errors import Lost, Rejected
from lowcomm_jax.store.records import Commit
from lowcomm_jax.store.wire import Arrays, Shapes, one_slice, owners

_AVERAGES, _WHOLE = "averages", "whole"


class TwoShotExchange(AgreedRound):
    """One exchange whose payloads are reduced in slices.

    In a first exchange, this one, slice s of every payload goes to region s, and the arrays beside
    the slices go to every region. Its commit record says who takes part, and who is present to
    average; another region averages the slice of one that is not. A second exchange carries the
    averages.

    Where a region is lost in between, the second record lacks its slices, in every region. Then the
    others exchange whole payloads in a third exchange, and average all slices themselves. The lost
    region then counts in no slice. The result is bit for bit as if that region had been left out
    from the beginning.
    """

    def __init__(self, context: ExchangeContext, request: ExchangeRequest):
        super().__init__(context, request)
        self._slicing = request.reduction
        self._followers: list[AgreedRound] = []

    @property
    def published(self) -> Published:
        """See `Round.published`."""
        others = [one.published for one in self._followers]
        return super().published | {name: x for one in others for name, x in one.items()}

    def result(self) -> dict[int, Arrays]:
        """See `AgreedRound`."""
        try:
            rest = super().result()
            if not self.commit.admitted:
                self.reduced = self._slicing.average_all({}, rest)
                return rest
            self.reduced = self._exchange_averages(self.commit, rest)
            return rest if self.reduced is not None else self._fall_back_to_whole(self.commit)
        finally:
            self.seconds = time.monotonic() - self.began
            self.cancel()  # the fetches of contributions

    def _follow_up(
        self,
        suffix: str,
        awaited: Callable[[int], bool],
        arrays: Arrays,
        like: dict[int, Shapes] | None = None,
        **more,
    ) -> tuple[Commit, dict[int, Arrays]]:
        """(record, everyone's arrays) of an exchange that follows, of arrays as they travel.

        `like`: shapes of each region's; None = those of whole payloads.
        """
        if like is None:
            like = dict.fromkeys(self.request.members, self._slicing.whole)
        key, name = f"{self.request.key}/{suffix}", _suffixed(self.request.name, suffix)
        changes = {"key": key, "name": name, "reduction": None, "terms": {}, "like": like}
        changes |= {"awaited": awaited, "teaches": False, "patience_s": 0.0, **more}
        changes["arrays"] = {name: x[None] for name, x in arrays.items()}
        request = dataclasses.replace(self.request, **changes)
        one = AgreedRound(self._context, request, due=self.due, news=self.news)
        self._followers.append(one)
        everyones = one.result()
        assert one.commit is not None  # it has its record
        return one.commit, everyones

    # -- the second exchange: averages -----------------------------------------------------------

    def _exchange_averages(self, commit: Commit, rest: dict[int, Arrays]) -> Arrays | None:
        """The averages of all slices, `[parts, ...]`; None = some region did not bring its own."""
        job = self._context.heartbeat.job
        owner = owners(sorted(commit.present), self._slicing.parts)
        here = self.request.joins and commit.saw(*job)
        numbers = [s for s in range(self._slicing.parts) if here and owner[s] == job.region]
        ours = self._averages(commit, rest, numbers)
        like = {region: {} for region in self.request.members}
        for s, region in enumerate(owner):
            like[region] |= {_label(s, name): shape for name, shape in self._slicing.like.items()}
        second, averages = self._follow_up(
            _AVERAGES, self._owes_averages(commit), arrays=ours, takes_part=bool(ours), like=like
        )
        if not _all_brought(commit, second):
            return None
        return {
            name: np.stack([averages[r][_label(s, name)] for s, r in enumerate(owner)])
            for name in self._slicing.like
        }

    def _owes_averages(self, commit: Commit) -> Callable[[int], bool]:
        """Whether to wait for a region's averages: it is alive, and still the same job."""
        heartbeat = self._context.heartbeat

        def owes(region: int) -> bool:
            beat = heartbeat.latest().get(region)
            if beat is None or beat.wants or not commit.saw(region, beat.incarnation):
                return False
            return region in heartbeat.living(certain=False)

        return owes

    def _averages(self, commit: Commit, rest: dict[int, Arrays], ours: list[int]) -> Arrays:
        """Averages of the slices that are ours, by label; none if a contribution cannot be had."""
        try:
            given = {s: self._contributions(commit, s) for s in ours}
        except (Lost, Rejected):
            return {}
        labelled = {}
        for s, slices in given.items():
            average = self._slicing.average(slices, rest, s)
            labelled |= {_label(s, name): x for name, x in average.items()}
        return labelled

    def _contributions(self, commit: Commit, number: int) -> dict[int, Arrays]:
        """Every region's slice of this number, by region; waits for those that are not here."""
        found, waiting = {}, {}
        for region, admitted in commit.admitted.items():
            fetch, payload = self.fetches.get(region), admitted.payload
            job = Job(region, admitted.incarnation)
            if job == self._context.heartbeat.job:
                found[region] = one_slice(self.host_payload.slices, number)
            elif number == self._context.region and fetch is not None and fetch.complete:
                found[region] = fetch.got[1]
            else:
                piece = slice_piece(self.request, region, payload, number)
                waiting[region] = Fetch(self._context, job, [piece], self.news)
                self._begun.append(waiting[region])
        self._until(lambda: all(fetch.arrived() for fetch in waiting.values()))
        return found | {r: fetch.got[0] for r, fetch in waiting.items()}

    # -- the third exchange: without the lost region ---------------------------------------------

    def _fall_back_to_whole(self, commit: Commit) -> dict[int, Arrays]:
        """Exchange whole payloads, and average every slice here."""

        def awaited(region: int) -> bool:
            return region in commit.present and self.request.awaited(region)

        third, whole = self._follow_up(_WHOLE, awaited, self.host_payload.whole)
        self.commit = msgspec.structs.replace(third, late=commit.late)
        split = {r: self._slicing.split(x) for r, x in whole.items()}
        rest = {r: rest for r, (rest, _) in split.items()}
        slices = {r: slices for r, (_, slices) in split.items()}
        self.reduced = self._slicing.average_all(slices, rest)
        return rest


def _all_brought(first: Commit, second: Commit) -> bool:
    """Whether every region that was present brought its averages."""
    return second.admitted.keys() >= first.present.keys()


def averages_of(name: str) -> str:
    """The name of the exchange of averages that follows the one of this name."""
    return _suffixed(name, _AVERAGES)


def _suffixed(name: str, suffix: str) -> str:
    return f"{name}+{suffix}"


def _label(number: int, name: str) -> str:
    return f"{number}/{name}"
