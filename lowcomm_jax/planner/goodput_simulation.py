"""Event simulation of interrupts, repairs and synchronisations of a `planner.goodput.Fleet`.

Call `plan_goodput`. Many fleets are simulated side by side, one array operation an event.
`interruptions` draws for every job by itself when it stops, and with how many chips it runs.
Interrupts come in real time, whether a region trains or waits, so that those of a region do not
depend on the others. `waiting` then adds the waits of regions for one another.

Shapes: R = fleets simulated side by side, J = jobs of a fleet, E = events of a job, C = R x J
columns, K = kinds of failure (a slice, a region).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowcomm_jax.network.randomness import generator
from lowcomm_jax.planner.goodput import METHODS, Fleet, Goodput, Reaction, closed_form
from lowcomm_jax.refused import refuse

FLEETS = 256
INTERRUPTS = 500  # of a fleet, about; where regions meet, which takes longer, fewer
INTERRUPTS_WAITING = 150
SLICE, REGION = 0, 1


@dataclass(frozen=True)
class Interruptions:
    """The interrupts of every job in [0, horizon_s].

    Attributes:
        start_RxJxE, end_RxJxE: when a job stopped, and when it trained again; equal for an event
            that did not stop it.
        share_RxJxE: share of its chips that trained before that stop.
        horizon_s: end of the measured time.
    """

    start_RxJxE: np.ndarray
    end_RxJxE: np.ndarray
    share_RxJxE: np.ndarray
    horizon_s: float

    @property
    def trained_RxJxE(self) -> np.ndarray:
        """Give the seconds of training before each event; the last entry ends with the horizon."""
        since = np.concatenate([np.zeros_like(self.end_RxJxE[..., :1]), self.end_RxJxE], axis=-1)
        until = np.concatenate(
            [self.start_RxJxE, np.full_like(self.end_RxJxE[..., :1], self.horizon_s)], axis=-1
        )
        return until - since

    @property
    def stays_RxJxE(self) -> np.ndarray:
        """Give the seconds of training from one stop to the next, at the event that ends them; 0 at
        events that stop nothing. The last entry ends with the horizon.
        """
        so_far = np.cumsum(self.trained_RxJxE, axis=-1)
        stops = np.ones(so_far.shape, bool)
        stops[..., :-1] = self.end_RxJxE > self.start_RxJxE
        last = np.maximum.accumulate(np.where(stops, so_far, 0.0), axis=-1)
        before = np.concatenate([np.zeros_like(last[..., :1]), last[..., :-1]], axis=-1)
        return np.where(stops, so_far - before, 0.0)

    @property
    def shares_RxJ(self) -> np.ndarray:
        """Give the mean share of its chips that a job trained with, while it trained."""
        share = np.concatenate([self.share_RxJxE, self.share_RxJxE[..., -1:]], axis=-1)
        trained = self.trained_RxJxE
        return (share * trained).sum(axis=-1) / np.maximum(trained.sum(axis=-1), 1e-12)


def plan_goodput(
    fleet: Fleet, methods: Sequence[str] = tuple(METHODS), seed: int = 0
) -> list[Goodput]:
    """Simulate methods on a fleet; equal arguments give equal figures.

    Args:
        fleet: chips and failures.
        methods: of `METHODS`.
        seed: of the interrupts.

    Raises:
        Refused: lists everything that cannot be simulated.
    """
    found = [
        f"method {name!r} is unknown: use {', '.join(METHODS)}"
        for name in methods
        if name not in METHODS
    ]
    refuse("goodput", found + fleet.violations())
    return [simulate(fleet, method, seed) for method in methods]


def simulate(fleet: Fleet, method: str, seed: int) -> Goodput:
    """Simulate one method on a valid fleet."""
    how = METHODS[method]
    between = fleet.period_s / (fleet.fragments if how.streaming else 1)
    grid = between if how.reaction == Reaction.ABSENT else 0.0
    found = interruptions(fleet, method, seed, grid)
    stays = found.stays_RxJxE
    kept = {
        Reaction.ABSENT: lambda: sent(stays, between, fleet.fragments if how.streaming else 1),
        Reaction.INDEPENDENT: lambda: sent_evenly(stays, fleet.decoupled_period_s),
    }.get(how.reaction, stays.copy)()
    kept[..., -1] = stays[..., -1]  # the horizon is no stop: nothing is lost there
    trained_RxJ, kept_RxJ = stays.sum(axis=-1), kept.sum(axis=-1)
    idle = found.start_RxJxE, found.end_RxJxE
    measured_R = np.full(len(stays), found.horizon_s)
    waited_RxJ = np.zeros_like(trained_RxJ)
    if how.reaction == Reaction.WAIT:
        overlap = fleet.overlap_s if how.streaming else 0.0
        rounds_R, measured_R, waited_RxJ, waits = waiting(found, between, overlap)
        trained_RxJ = kept_RxJ = np.repeat(rounds_R[:, None] * between, stays.shape[1], axis=1)
        idle = tuple(np.concatenate(pair, axis=-1) for pair in zip(idle, waits, strict=True))
    jobs = (fleet.chips,) if how.reaction == Reaction.ONE_JOB else fleet.regions
    weights_J = np.array(jobs) / fleet.allocated

    def share(seconds_RxJ: np.ndarray) -> np.ndarray:
        return (seconds_RxJ / measured_R[:, None]) @ weights_J

    whole_RxJ = found.shares_RxJ
    full_R, kept_R = share(trained_RxJ), share(kept_RxJ * whole_RxJ)
    waiting_R, used = share(waited_RxJ), fleet.chips / fleet.allocated
    overhead = fleet.overhead_of(method)
    goodput_R = (1.0 - overhead) * kept_R
    lost = {
        "stopped": used - full_R - waiting_R,
        "waiting": waiting_R,
        "broken": share(trained_RxJ * (1.0 - whole_RxJ)),
        "unsent": share((trained_RxJ - kept_RxJ) * whole_RxJ),
        "spare": np.full_like(kept_R, 1.0 - used),
        "overhead": overhead * kept_R,
    }
    return Goodput(
        method=method,
        goodput=float(goodput_R.mean()),
        uptime=1.0 - float((all_idle(*idle, measured_R) / measured_R).mean()),
        lost={what: float(part_R.mean()) for what, part_R in lost.items()},
        error=float(goodput_R.std(ddof=1) / np.sqrt(len(goodput_R))),
    )


def sent(trained: np.ndarray, between: float, fragments: int) -> np.ndarray:
    """Give the seconds of work already sent, of those from a synchronisation to a stop.

    After n sends the fragment that left j sends ago has kept n - j of them (none below 0); the mean
    over fragments counts.
    """
    sends = np.floor(trained / between + 1e-9)
    counted = np.minimum(sends, fragments)
    return between / fragments * (sends * counted - counted * (counted - 1) / 2)


def sent_evenly(trained: np.ndarray, period_s: float) -> np.ndarray:
    """The same with a fragment sent at every moment, each once a period."""
    if period_s == 0:
        return trained.copy()
    return np.where(trained < period_s, trained**2 / (2 * period_s), trained - period_s / 2)


# -- one job by itself -------------------------------------------------------------------------


class _Failed:
    """Failed parts of every column by kind, in the order in which they come back.

    Every part of a kind is away for the same time, so the oldest is back first.
    """

    def __init__(self, columns: int, away_K: np.ndarray):
        self._back = np.full((columns, 2, 64), np.inf)
        self._first, self._end = np.zeros((2, columns, 2), int)
        self._away_K = away_K

    @property
    def count_CxK(self) -> np.ndarray:
        """Parts that are away."""
        return self._end - self._first

    @property
    def back_CxK(self) -> np.ndarray:
        """When the oldest of each kind is back; inf = nothing of it is away."""
        place = np.minimum(self._first, self._back.shape[2] - 1)
        back = np.take_along_axis(self._back, place[..., None], axis=2)[..., 0]
        return np.where(self._first < self._end, back, np.inf)

    def add(self, columns: np.ndarray, kinds: np.ndarray, now: np.ndarray) -> None:
        """A part of a kind fails, one in each of the named columns."""
        if self._end.max() == self._back.shape[2]:
            self._make_room()
        self._back[columns, kinds, self._end[columns, kinds]] = now + self._away_K[kinds]
        self._end[columns, kinds] += 1

    def take_back(self, due_CxK: np.ndarray) -> None:
        """The oldest part is back, where `due_CxK` says so."""
        self._first += due_CxK

    def _make_room(self) -> None:
        """Drop chips that are back, and double the room if most of it is still used."""
        size = self._back.shape[2]
        place = np.minimum(self._first[..., None] + np.arange(size), size - 1)
        self._back = np.take_along_axis(self._back, place, axis=2)
        self._first, self._end = np.zeros_like(self._first), self.count_CxK
        if self._end.max() > size // 2:
            self._back = np.concatenate([self._back, np.full_like(self._back, np.inf)], axis=2)


class _Jobs:
    """The jobs of `FLEETS` fleets side by side; `next_event` is one event of each.

    Attributes:
        rate_J: interrupts a second of each job of a fleet while it is whole.
        running: share of the time jobs train, about.
        settle_s: seconds until the beginning, with everything whole, is forgotten.
    """

    def __init__(self, fleet: Fleet, method: str, seed: int, grid_s: float):
        alone = METHODS[method].reaction == Reaction.ONE_JOB
        slices_J = np.array([sum(fleet.rates)] if alone else fleet.rates)
        chips_J = np.array([fleet.chips] if alone else fleet.regions, float)
        self._elastic, self._stop_s = fleet.elastic(method), fleet.stop_of(method)
        self._grid_s = grid_s
        self._members = len(fleet.regions) if alone else 1
        away = fleet.outage_mtbf_s is not None
        self._outages = self._members / fleet.outage_mtbf_s if away else 0.0
        self._chips_C, self._slices_C = np.tile(chips_J, FLEETS), np.tile(slices_J, FLEETS)
        slices_CxK = np.full_like(self._chips_C, fleet.slice_chips), self._chips_C / self._members
        self._size_CxK = np.stack(slices_CxK, axis=1)
        self._spare_K = np.array([fleet.spare_slices * self._members, 0])
        self._rng = generator(seed, ("goodput", fleet.regions))
        self._failed = _Failed(len(self._chips_C), np.array([fleet.repair_s, fleet.outage_s]))
        self.rate_J = slices_J + self._outages
        each_s = self._stop_s + grid_s / 2
        self.running = float(np.mean([closed_form(1 / rate, each_s, 0.0) for rate in self.rate_J]))
        away_s = fleet.repair_s + (fleet.outage_s if away else 0.0)
        self.settle_s = 2.0 * away_s + 5.0 * self._stop_s

    @property
    def _missing_CxK(self) -> np.ndarray:
        """Parts that no spare one replaces."""
        return np.maximum(self._failed.count_CxK - self._spare_K, 0)

    def next_event(self, now_C: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Give when jobs that train at `now_C` stop, when they train again, and the share of their
        chips that trains until then. A job that need not stop trains again at once.
        """
        failed, rows_C = self._failed, np.arange(len(now_C))
        while (due_CxK := failed.back_CxK <= now_C[:, None]).any():
            failed.take_back(due_CxK)  # it came back during a stop: the job started with it
        missing_CxK, back_CxK = self._missing_CxK, failed.back_CxK
        share_C = 1.0 - (missing_CxK * self._size_CxK).sum(axis=1) / self._chips_C
        share_C = np.clip(share_C, 0.0, 1.0)
        slices_C = self._slices_C * share_C
        away_C = failed.count_CxK[:, REGION] / self._members
        rate_C = slices_C + self._outages * (1.0 - away_C)
        interrupt_C = now_C + self._rng.exponential(size=len(now_C)) / rate_C
        region_C = self._rng.random(len(now_C)) * rate_C >= slices_C
        start_C = np.minimum(interrupt_C, back_CxK.min(axis=1))
        returns_C, kind_C = back_CxK.min(axis=1) <= interrupt_C, back_CxK.argmin(axis=1)
        failed.take_back(returns_C[:, None] & (np.arange(2) == kind_C[:, None]))
        # An elastic job stops to take a part in, unless the part becomes a spare one.
        stops_C = ~returns_C | (self._elastic & (missing_CxK[rows_C, kind_C] > 0))
        broken = np.flatnonzero(~returns_C)
        again_C = start_C.copy()
        again_C[broken] = self._again(broken, region_C[broken].astype(int), start_C[broken])
        end_C = np.where(stops_C, again_C + self._stop_s, start_C)
        if self._grid_s:
            end_C = np.where(stops_C, np.ceil(end_C / self._grid_s) * self._grid_s, end_C)
        return start_C, end_C, share_C

    def _again(self, columns: np.ndarray, kinds: np.ndarray, now: np.ndarray) -> np.ndarray:
        """Parts fail: give when there is enough to train with."""
        self._failed.add(columns, kinds, now)
        missing = self._missing_CxK[columns]
        gone = (missing * self._size_CxK[columns]).sum(axis=1) >= self._chips_C[columns]
        cannot = gone if self._elastic else (missing > 0).any(axis=1)
        return np.where(cannot, self._failed.back_CxK[columns, kinds], now)


def interruptions(fleet: Fleet, method: str, seed: int, grid_s: float = 0.0) -> Interruptions:
    """Draw the interrupts of every job of a fleet by itself.

    Args:
        fleet, method: that are simulated.
        seed: of the draws.
        grid_s: a stopped job trains again at the next multiple; 0 = at once.
    """
    jobs = _Jobs(fleet, method, seed, grid_s)
    waits = METHODS[method].reaction == Reaction.WAIT
    count = INTERRUPTS_WAITING if waits else INTERRUPTS
    horizon = count / jobs.rate_J.sum() / jobs.running
    now_C, events = np.full(FLEETS * len(jobs.rate_J), -jobs.settle_s), []
    while (now_C < horizon).any():
        event = jobs.next_event(now_C)
        now_C = event[1]
        if (now_C > 0).any():
            events.append(event)
    shape = FLEETS, len(jobs.rate_J), len(events)
    start, end, share = (np.stack(parts, axis=-1).reshape(shape) for parts in zip(*events))
    return Interruptions(start.clip(0, horizon), end.clip(0, horizon), share, horizon)


# -- regions that wait for one another ---------------------------------------------------------


def waiting(
    found: Interruptions, between_s: float, overlap_s: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Let regions send every `between_s` seconds of training, and wait for all payloads.

    A region trains on for `overlap_s` after a send; then it needs the payloads of all.

    Returns:
        - rounds_R: sends of every fleet;
        - seconds_R: when its last region had made them;
        - waited_RxJ: seconds a region could have trained, and waited;
        - (from, to) of every wait, [R, J, rounds] each.
    """
    clock = _TrainingClock(found)
    fleets, jobs, _ = found.start_RxJxE.shape
    sent_RxJ, waited_RxJ = np.zeros((2, fleets, jobs))
    rounds_R, froms, tos = np.zeros(fleets), [], []
    while True:
        ready_RxJ = clock.after(sent_RxJ, overlap_s) if overlap_s else sent_RxJ
        lands_RxJ = np.maximum(ready_RxJ, sent_RxJ.max(axis=1, keepdims=True))
        next_RxJ = clock.after(lands_RxJ, between_s - overlap_s)
        going_R = next_RxJ.max(axis=1) <= found.horizon_s
        if not going_R.any():
            waits = np.stack(froms, axis=-1), np.stack(tos, axis=-1)
            return rounds_R, sent_RxJ.max(axis=1), waited_RxJ, waits
        going_RxJ = going_R[:, None]
        froms.append(np.where(going_RxJ, ready_RxJ, 0.0))
        tos.append(np.where(going_RxJ, lands_RxJ, 0.0))
        waited_RxJ += going_RxJ * (clock.trained(lands_RxJ) - clock.trained(ready_RxJ))
        # Until the next stop of any region every round is like this one, if nobody waited.
        steady_R = (np.abs(next_RxJ - sent_RxJ - between_s) < 1e-3 * between_s).all(axis=1)
        until_RxJ = np.minimum(clock.next_stop(next_RxJ), found.horizon_s)
        calm_R = np.floor((until_RxJ - next_RxJ) / between_s).min(axis=1)
        calm_R = np.where(steady_R, np.maximum(calm_R, 0), 0)
        sent_RxJ = np.where(going_RxJ, next_RxJ + calm_R[:, None] * between_s, sent_RxJ)
        rounds_R += np.where(going_R, 1 + calm_R, 0)


class _TrainingClock:
    """Seconds a region has trained by a time, and back. All regions lie in one sorted array, each
    shifted by more than any of them lasts.
    """

    def __init__(self, found: Interruptions):
        fleets, jobs, events = found.start_RxJxE.shape
        start, end = (a.reshape(-1, events) for a in (found.start_RxJxE, found.end_RxJxE))
        self._far = 2.0 * found.horizon_s
        self._shift = (np.arange(fleets * jobs) * 2.0 * self._far).reshape(fleets, jobs)
        zeros, far = np.zeros((len(start), 1)), np.full((len(start), 1), self._far)
        edges = np.stack([start, end], axis=-1).reshape(len(start), -1)
        edges = np.concatenate([zeros, edges, far], axis=1)
        runs = np.diff(edges, axis=1)
        runs[:, 1::2] = 0.0
        trained = np.concatenate([zeros, np.cumsum(runs, axis=1)], axis=1)
        shift = self._shift.reshape(-1, 1)
        self._edges, self._trained = (edges + shift).ravel(), (trained + shift).ravel()
        self._starts = np.concatenate([start, far], axis=1)
        self._starts = np.sort((self._starts + shift).ravel())

    def trained(self, time_RxJ: np.ndarray) -> np.ndarray:
        """Seconds of training by a time."""
        shifted = time_RxJ + self._shift
        return np.interp(shifted, self._edges, self._trained) - self._shift

    def after(self, time_RxJ: np.ndarray, seconds: float) -> np.ndarray:
        """The time at which a region has trained for a number of seconds more."""
        wanted = self.trained(time_RxJ) + seconds + self._shift
        return np.interp(wanted, self._trained, self._edges) - self._shift

    def next_stop(self, time_RxJ: np.ndarray) -> np.ndarray:
        """When a region stops next; beyond the horizon if it does not."""
        shifted = time_RxJ + self._shift
        place = np.searchsorted(self._starts, shifted, side="right")
        return self._starts[np.minimum(place, len(self._starts) - 1)] - self._shift


def all_idle(start_RxJxE: np.ndarray, end_RxJxE: np.ndarray, until_R: np.ndarray) -> np.ndarray:
    """Give the seconds, before `until_R`, in which every job of a fleet is idle.

    Args:
        start_RxJxE, end_RxJxE: idle intervals in any order; those of one job may overlap.
        until_R: seconds.
    """
    fleets, jobs, _ = start_RxJxE.shape
    order = np.argsort(start_RxJxE, axis=-1)
    start, end = (np.take_along_axis(a, order, axis=-1) for a in (start_RxJxE, end_RxJxE))
    before = np.maximum.accumulate(end, axis=-1)
    start[..., 1:] = np.maximum(start[..., 1:], before[..., :-1])
    end = np.maximum(start, end)  # of one job disjoint from here on
    times = np.concatenate([start, end], axis=-1).reshape(fleets, -1)
    times = np.minimum(times, until_R[:, None])
    ones = np.ones(start.shape)
    steps = np.concatenate([ones, -ones], axis=-1).reshape(fleets, -1)
    order = np.argsort(times, axis=-1, kind="stable")
    times, steps = (np.take_along_axis(a, order, axis=-1) for a in (times, steps))
    idle = np.cumsum(steps, axis=-1)[:, :-1] >= jobs - 0.5
    return (np.diff(times, axis=-1) * idle).sum(axis=-1)
