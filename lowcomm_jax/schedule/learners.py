r"""Independent learners, a quorum and a grace window (arXiv 2604.21428).

Time is counted in ticks (`pace`), and no learner waits for another one.

Round k handles fragment k mod P. With H = P a round opens at every tick, else after the ticks at
which `Staggered` sends. A learner has *reported* for a round when it has made an inner step since
the round before opened, and since the fragment's last round landed. A round:

1. opens, after its fragment's last round has landed;
2. has its quorum when K learners that are up have reported;
3. closes when all that are up have reported, or when the grace window is over, and not before the
   round before it. Those who have reported are *admitted*: their values of this moment count;
4. lands tau ticks after its quorum (later where the wire needs longer): every learner that is up
   receives the fragment, admitted or not.

The window (eq. 3 there) spends only what overlap hides anyway. In ticks:

.. math::
   \text{grace} = \lfloor \gamma \max(0,\; \tau - \xi_{\text{quorum}} - \xi_{\text{sync}}) \rfloor

where xi_quorum is an average over rounds of the ticks from opening to quorum, and xi_sync the ticks
that a fragment needs to travel.

All of this follows from the settings and the step, so that the state remembers nothing else.

Our reading, where the source is ambiguous or was not read whole:

- the definition of a report;
- a round opens while the one before is still in its window;
- all waiting is counted in ticks;
- one average for all learners, with a decay of 0.9.

gamma was not found in the source.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from typing import Any, ClassVar, NamedTuple

import numpy as np

from lowcomm_jax.refused import is_whole
from lowcomm_jax.schedule.base import (
    Admission,
    Adopt,
    Move,
    Paced,
    Send,
    Stage,
    Staggered,
    View,
    common_violations,
)
from lowcomm_jax.schedule.pace import Outage, Pace
from lowcomm_jax.state.train_state import SyncCounters

_DECAY = 0.9  # of the average time to a quorum


class ScriptedRound(NamedTuple):
    """One round on one mesh, as speeds and outages script it.

    Attributes:
      fragment: that the round handles.
      opens, quorum, closes, lands: ticks, see the module docstring.
      admitted: bool `[R]`, the learners whose values count.
    """

    fragment: int
    opens: int
    quorum: int
    closes: int
    lands: int
    admitted: np.ndarray


@dataclasses.dataclass(frozen=True)
class Learners(Paced):
    """Independent learners. See `Schedule` for the other fields.

    Attributes:
      admission: quorum, grace window and weights.
      speeds: inner steps per second of each learner, in any unit, `[R]`; () = all equal.
      outages: when learners are down.
      travel: ticks that a fragment needs to travel; None = as the network says, or none.
    """

    period: int
    fragments: int
    delay: int
    admission: Admission = Admission()  # noqa: RUF009 (frozen)
    speeds: tuple[float, ...] = ()
    outages: tuple[Outage, ...] = ()
    travel: tuple[int, ...] | None = None
    simulated: ClassVar[tuple[str, ...]] = ("speeds", "outages")
    copies: ClassVar[bool] = True

    # -- rounds -----------------------------------------------------------------------------------

    def opens(self, number: int) -> int:
        """The tick at which a round opens, unless its fragment is still on its way."""
        return Staggered(self.period, self.fragments).first(number)

    def gap(self, number: int) -> int:
        """Ticks from the opening of the round before to that of this one."""
        return self.opens(number) - self.opens(number - 1)

    def rounds_by(self, step: int) -> int:
        """How many rounds open until a tick, itself included."""
        return -(-(step + 1) * self.fragments // self.period) - 1

    def rounds_closing(self, step: int, regions: int) -> list[ScriptedRound]:
        """The rounds that close at this tick, oldest first."""
        return _rounds(self, regions).closing(step)

    def due(self, step: int, counters: SyncCounters) -> tuple[Send, ...]:
        """Every round that closes, with the learners that it admits."""
        regions = counters.last_landed.shape[1]
        up, rounds = self.pace.up(step, regions), self.rounds_closing(step, regions)
        return tuple(Send((r.fragment,), r.admitted & up, r.lands) for r in rounds)

    # -- a learner that is a job of its own -------------------------------------------------------

    def acts_by_rounds(self, step: int, view: View) -> Stage:
        """Rounds that have arrived land, in their order, then the learner reports.

        It looks again after its next step.
        """
        return () if view.has_sent(step) else self._lands(step, view) or self._reports(step, view)

    def _lands(self, step: int, view: View) -> Stage:
        """The next round, if it is here; the learner adopts, admitted or not.

        A round that it has reported to lands no sooner than tau ticks later: its own steps, or
        those of a faster learner.
        """
        agreed, p = view.agreed, view.agreed.landed % self.fragments
        reported = [(k, f) for k, f in view.flights if f.fragment == p]
        ticks = self.opens(agreed.newest) - self.opens(agreed.landed)
        early = reported and step < reported[0][1].due[0] and ticks < self.delay
        if agreed.over or early or not agreed.arrived:
            return ()
        key = agreed.key(p, step, reported)
        return Move(key), Adopt(p, key, np.ones(1, bool))

    def _reports(self, step: int, view: View) -> Stage:
        """Reports to all open rounds that the learner can report to; opens the next in its time.

        It can where the fragment's last round has landed here and a step was made since, so that
        all reports to a round are encoded against one anchor. It opens a round once it has made as
        many steps as lie between two rounds since it saw the newest one open. So the fastest
        learner decides how often rounds begin.
        """
        agreed, K = view.agreed, self.fragments
        flying = {int(f.fragment) for _, f in view.flights}
        most = agreed.landed + K if agreed.last is None else min(agreed.landed + K, agreed.last)
        until = agreed.newest + 1 + (step - agreed.since >= self.gap(agreed.newest + 1))
        numbers = range(max(agreed.landed, agreed.committed), min(until, most))
        landed = np.maximum(view.counters.last_landed[:, 0], 0)
        can = [n % K for n in numbers if step > landed[n % K] and n % K not in flying]
        return () if view.away else tuple(Send((p,)) for p in can)

    def violations(self, regions: int) -> list[str]:
        pace = Pace(self._speeds(regions), self.outages)
        problems = common_violations(self, regions, "overlap")
        problems += self.admission.violations(regions) + pace.violations(regions)
        if not self.one_delay:
            problems.append(f"overlap={self.delay}: one number for all learners is needed")
        travel = max(self.travel or (), default=0)
        if is_whole(self.delay) and 0 <= self.delay < travel:
            problems.append(
                f"overlap={self.delay}: writing, committing and fetching a fragment takes "
                f"{travel} inner steps on this network; use overlap >= {travel}"
            )
        return problems

    def _speeds(self, regions: int) -> Any:
        equal = isinstance(self.speeds, tuple) and not self.speeds
        return (1.0,) * regions if equal else self.speeds


class _ScriptedRounds:
    """The rounds of one schedule, computed as far as they were asked for."""

    def __init__(self, schedule: Learners, regions: int):
        self.schedule, self.pace, self.regions = schedule, schedule.pace, regions
        self.rounds: list[ScriptedRound] = []
        self.closes: list[int] = []
        self.to_quorum = 0.0

    def closing(self, step: int) -> list[ScriptedRound]:
        self._until(step)
        start = bisect.bisect_left(self.closes, step)
        return self.rounds[start : bisect.bisect_right(self.closes, step)]

    def _until(self, step: int) -> None:
        """Compute rounds until one closes after `step`; later ones close no earlier."""
        while not self.closes or self.closes[-1] <= step:
            found = self._next()
            self.rounds.append(found)
            self.closes.append(found.closes)

    def _next(self) -> ScriptedRound:
        """The next round: when it opens, has its quorum, closes and lands, and whom it admits."""
        schedule, k = self.schedule, len(self.rounds)
        gap = schedule.gap(k)
        opens = gap + (self.rounds[-1].opens if k else 0)
        since = opens - gap
        if k >= schedule.fragments:
            landed = self.rounds[k - schedule.fragments].lands
            opens, since = max(opens, landed + 1), max(since, landed)
        quorum = opens
        while np.sum(self._reported(since, quorum)) < schedule.admission.quorum:
            quorum += 1
        travel = max(schedule.travel or (), default=0)
        slack = max(0.0, schedule.delay - self.to_quorum - travel)
        window = math.floor(schedule.admission.grace * slack + 1e-9)
        closes = max(quorum, self.closes[-1] if k else 0)
        while closes < quorum + window and self._missing(since, closes):
            closes += 1
        self.to_quorum = _DECAY * self.to_quorum + (1 - _DECAY) * (quorum - opens)
        return ScriptedRound(
            fragment=k % schedule.fragments,
            opens=opens,
            quorum=quorum,
            closes=closes,
            lands=max(quorum + schedule.delay, closes + travel),
            admitted=self._reported(since, closes),
        )

    def _reported(self, since: int, step: int) -> np.ndarray:
        """Bool `[R]`: up, and has made an inner step in ticks since + 1 to `step`."""
        made = self.pace.made
        stepped = made(step, self.regions) > made(since, self.regions)
        return stepped & self.pace.up(step, self.regions)

    def _missing(self, since: int, step: int) -> bool:
        return bool((self.pace.up(step, self.regions) & ~self._reported(since, step)).any())


@functools.lru_cache(maxsize=16)
def _rounds(schedule: Learners, regions: int) -> _ScriptedRounds:
    return _ScriptedRounds(schedule, regions)
