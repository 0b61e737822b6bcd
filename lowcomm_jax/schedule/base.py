"""The contract of a schedule: which acts are to be done after a step, and in which order.

After every inner step the loop asks `Schedule.acts` for a stage, a tuple of acts, and does them,
until there is none. A schedule reads counters, decisions and payloads in flight (`View`), never an
array, so that every region decides alike. It is a frozen dataclass of attributes that loop,
refusals and plans read. One of its own says in `due` whose turn it is; the acts follow from that,
and no method of a schedule overrides another. What it remembers between steps is
`SyncCounters.decided`: the loop stores that, checkpoints keep it, and `Remembering.decide` changes
it (for `TwoLevels` the loop itself). `Staggered` is the schedule of DiLoCo, Streaming DiLoCo, and
most others.

The acts name what is *still to be done*. They leave marks: a send `last_sent`, a move
`InFlight.anchor_updated`, an adoption a flight that is gone or waits for fewer regions. So a step
that was stopped before its last landing goes on there, and the same function, asked for a later
step, says whether something is due then. A send of nobody is a send. An empty move alone leaves no
mark: while a step is done the loop remembers it (`View.crossed`), and the carrier of jobs never
stops a one-period step behind its send.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from lowcomm_jax.refused import at_least, is_number, is_whole
from lowcomm_jax.schedule.pace import Outage, Pace
from lowcomm_jax.schedule.timing import NetworkTiming, syncs_per_period
from lowcomm_jax.settings import SWITCH
from lowcomm_jax.state.train_state import Decided, InFlight, SyncCounters, flight_key

FirstRound = Literal["empty", "blocking"]
Rates = Callable[[], np.ndarray]
"""Fetches a statistic of the fragments, float32 `[K]`; it may wait for the device."""


class Send(NamedTuple):
    """Measure the pseudo-gradient of a fragment, encode it and put it in flight.

    Attributes:
      fragments: those that may leave; one of them does (`leaves`).
      admitted: bool `[R]`, who may take part; None = all.
      lands: the step at which it lands in all regions, whoever took part; None = after the delay of
        each, in those that took part.
      rated: those that the schedule's `statistic` decides among; they come behind all others.
    """

    fragments: tuple[int, ...]
    admitted: np.ndarray | None = None
    lands: int | None = None
    rated: tuple[int, ...] = ()

    def leaves(self, rates: Rates) -> int:
        """The fragment that leaves: the first; if all are rated, the first of the largest rate."""
        first, *others = self.fragments
        if not others or first not in self.rated:
            return first
        rate = rates()
        return max(self.fragments, key=lambda p: rate[p])


class Move(NamedTuple):
    """Move the anchor by a payload.

    Attributes:
      key: of the payload; None = an empty one, so that momentum alone moves the anchor.
      fresh: key of the payload that was just sent, for rules that apply a region's own part apart.
      applied: whether such rules have applied the regions' own parts of `key` before.
    """

    key: str | None
    fresh: str | None = None
    applied: bool = True


class Adopt(NamedTuple):
    """Let regions adopt the anchor by the landing rule.

    Attributes:
      key: of the payload that moved it; None = that was empty, and `fresh` stands for it.
      regions: bool `[R]`.
      later: bool `[R]`, regions for which the payload stays in flight; None = it is dropped.
    """

    fragment: int
    key: str | None
    regions: np.ndarray
    later: np.ndarray | None = None
    fresh: str | None = None


class Copy(NamedTuple):
    """Let a region that comes back take over a peer's private state."""

    region: int
    peer: int


class Drop(NamedTuple):
    """Take a payload back: what was sent is sent again later, with what follows."""

    key: str


class Wait(NamedTuple):
    """Stand still until the next round has arrived (`RoundsAgreed`)."""


Stage = tuple[Send | Move | Adopt | Copy | Drop | Wait, ...]
"""Acts that are done together: sends; moves and the adoptions behind them; or acts of one kind."""


@dataclasses.dataclass(frozen=True)
class Admission:
    """For whom a round waits, and how those admitted count.

    Attributes:
      quorum: K, learners that must have reported.
      grace: gamma, share of the slack that a round waits for the others, in [0, 1).
      weights: `token_rate`: w of `methods.decoupled_diloco`, of tokens and steps since the learner
        received the fragment; or as `given` to the engine.
    """

    quorum: int = 1
    grace: float = 0.0
    weights: Literal["token_rate", "given"] = "token_rate"

    def violations(self, regions: int) -> list[str]:
        """Settings that cannot work, one line with its fix each."""
        problems = []
        if not (is_whole(self.quorum) and 1 <= self.quorum <= regions):
            problems.append(
                f"quorum={self.quorum!r}: give a number from 1 to the number of regions ({regions})"
            )
        if not (is_number(self.grace) and 0 <= self.grace < 1):
            problems.append(f"grace={self.grace!r}: give a share of the slack, from 0 to below 1")
        if self.weights not in ("token_rate", "given"):
            problems.append(f"weights={self.weights!r}: use token_rate or given")
        return problems


class RoundsAgreed(NamedTuple):
    """What regions that are jobs at a pace of their own have agreed on, as one of them sees it.

    Round k handles fragment k mod K. Rounds land in their order.

    Attributes:
      region: this one.
      landed: rounds that have landed here.
      committed: the first round of which no record is known.
      newest: the newest round that is open.
      since: the step at which this region saw it open.
      last: the first round that the run does not have; None = it has no end.
      arrived: whether the payloads of round `landed` are here.
      ours: whether its record names this region.
    """

    region: int
    landed: int
    committed: int
    newest: int
    since: int
    last: int | None
    arrived: bool
    ours: bool

    @property
    def over(self) -> bool:
        """Whether all rounds of the run have landed here."""
        return self.last is not None and self.landed >= self.last

    def key(self, fragment: int, step: int, flights: list[tuple[str, InFlight]]) -> str:
        """Key of the payload by which round `landed` moves the anchor: this region's, or of others.

        Args:
          flights: of this region, the payloads that it has sent to the round.
        """
        if flights:
            return flights[0][0]
        return f"{flight_key(fragment, step)}+{self.landed}"


class View(NamedTuple):
    """What a schedule sees of the training state.

    Attributes:
      flights: (key, payload in flight) in the order of their sends; no array is read.
      regions: number of regions R of this job.
      crossed: whether a one-period boundary at this step has been crossed.
      away: whether no region here takes part in what is sent now.
      agreed: where records of rounds say what lands, instead of steps (`Paced.acts_by_rounds`).
    """

    counters: SyncCounters
    flights: list[tuple[str, InFlight]]
    regions: int
    crossed: bool = False
    away: bool = False
    agreed: RoundsAgreed | None = None

    def has_sent(self, step: int) -> bool:
        """Whether the sends of this step are done."""
        return bool((self.counters.last_sent == step).any())


class Schedule(abc.ABC):
    """Decides, on the host and alike in every region, which fragments leave after a step.

    Attributes:
      period: H, inner optimizer steps between two syncs of the same parameters.
      fragments: K.
      delay: tau, inner steps between send and landing; one int, or one per region.
      land_after_send: the due payload lands after the send of the same step, so that the new
        pseudo-gradient is measured before the anchor moves. For methods that overlap a whole
        period: a fragment in flight is sent again, and lands at the next boundary.
      statistic: what rated fragments (`Send.rated`) are compared by, reduced over the regions at
        every landing. `none`: nothing. `rate`: the change of the fragment that lands. `drift`: that
        of every fragment, which travels in the payloads' headers.
      remembers: whether it has a `start` (`Remembering`; of `TwoLevels` its loop decides).
      window: rounds that are measured before what has landed decides anything.
      measured: whether the run measures the seconds of a step and of a synchronisation; they travel
        in the headers, too.
      by_steps: whether the step alone decides what is sent, whatever has landed.
      never_sends: whether there is no main exchange, for methods of channels alone.
      speeds: inner steps per second of each region, in any unit, `[R]`; () = all equal, in a
        schedule that has `outages`; None = every region makes a step at each step of the run.
      outages: when regions are down (`copies`).
      by_rounds: whether regions that are jobs have rounds in common, and no steps (`Paced`).
      most: regions that one landing, or one round between jobs, admits at most, those that came
        first; None = all. With 1 each region arrives alone, and between jobs it stands still from
        its send until that lands.
      admission: for whom a round waits; None = for all.
      needs_step: whether a region that has made no inner step since it last took part is absent.
      simulated: names of settings that say how regions fare in one program, and that jobs find out
        by themselves.
      copies: whether regions may be down. A payload then lands in all that are up, and who comes
        back copies a peer (`Copy`).
      local_servers: whether regions arrive at local servers; their loop reads what `TwoLevels` has.
      every: arrivals at a local server between its sends.
      first_round: what the first boundary of a one-period method lands: an `empty` payload, or
        (`blocking`) the one just sent.
      energy: share of the squared norm by which the rank of every reduced payload is measured, for
        schedules that follow it; None = not measured.
      ranks: of the levels of its codec, falling; () = the codec has one level.
      syncs, gamma: N, sends per period, of schedules that have such (`Adaptive`); None = as many as
        a network allows when a share of gamma of it is used (`settle`).
      travel: inner steps that a payload of each level needs to travel; () = nobody asks; None = as
        the network says, if there is one (`settle`).
    """

    period: int
    fragments: int
    delay: int | tuple[int, ...]
    land_after_send: bool = False
    statistic: Literal["none", "rate", "drift"] = "none"
    remembers: bool = False
    window: int = 0
    measured: bool = False
    by_steps: bool = False
    never_sends: bool = False
    speeds: tuple[float, ...] | None = None
    outages: tuple[Outage, ...] = ()
    by_rounds: bool = False
    most: int | None = None
    admission: Admission | None = None
    needs_step: bool = False
    simulated: tuple[str, ...] = ()
    copies: bool = False
    local_servers: bool = False
    every: int = 1
    first_round: FirstRound = "empty"
    energy: float | None = None
    ranks: tuple[int, ...] = ()
    syncs: int | None = 0
    gamma: float | None = None
    travel: int | tuple[int, ...] | None = ()

    @abc.abstractmethod
    def due(self, step: int, counters: SyncCounters) -> tuple[Send, ...]:
        """What may leave after inner step `step`, if nothing were in flight."""

    @abc.abstractmethod
    def violations(self, regions: int) -> list[str]:
        """What is wrong with the settings, one line with its fix each."""

    # -- answers that follow from the attributes --------------------------------------------------

    @property
    def pace(self) -> Pace | None:
        """When regions make inner steps; None = all of them, at every step."""
        return None if self.speeds is None else Pace(self.speeds, self.outages)

    @property
    def uneven(self) -> bool:
        """Whether regions make different numbers of inner steps. Jobs then go `by_rounds`."""
        return self.speeds is not None

    @property
    def one_delay(self) -> bool:
        """Whether `delay` is one value, of whatever type, and not one a region."""
        return not np.ndim(np.asarray(self.delay, object))

    @property
    def by_token_rate(self) -> bool:
        """Whether regions are weighted by what they made since the fragment landed."""
        return self.admission is not None and self.admission.weights == "token_rate"

    @property
    def cycle(self) -> int:
        """Inner steps after which its acts repeat, as far as the settings say."""
        return self.period * self.every

    @property
    def needs_network(self) -> bool:
        """Whether a setting is missing that only a network gives (`settle`)."""
        return self.syncs is None

    def settle(self, timing: NetworkTiming) -> Schedule:
        """The same schedule, with what it leaves to the network filled in from its timing."""
        given = {}
        if self.syncs is None:
            # The largest fragment's T_s: a slot must fit whichever is chosen.
            seconds = timing.step_seconds, timing.slowest(self.fragments)
            given["syncs"] = syncs_per_period(self.period, self.fragments, self.gamma, *seconds)
        if self.travel is None:
            levels = range(max(1, len(self.ranks)))
            given["travel"] = tuple(timing.travel(self.fragments, level) for level in levels)
        return dataclasses.replace(self, **given) if given else self

    def header_floats(self) -> int:
        """How many fp32 numbers travel with every payload."""
        drift = self.fragments if self.statistic == "drift" else 0
        return drift + (2 if self.measured else 0)

    def level(self, counters: SyncCounters) -> int:
        """Level of the codec (`Codec.at`) for a payload that leaves now; 0 = the first."""
        return int(counters.decided.get("level", 0))

    # -- acts -------------------------------------------------------------------------------------

    def acts(self, step: int, view: View) -> Stage:
        """What is still to be done after inner step `step`; () = nothing, so that the step is done.

        First payloads of earlier steps land, then fragments leave, then payloads without delay
        land. Where payloads land after the send of the same step, the new pseudo-gradient is
        measured before the anchor moves. At last regions that come back copy a peer.
        """
        if self.land_after_send:
            return self.sends(step, view) or self.boundary(step, view)
        return self.landings(step, view) or self.sends(step, view) or self._copies(step, view)

    def sends(self, step: int, view: View) -> Stage:
        """The stage of the sends: what is due and not in flight."""
        due = self.due(step, view.counters)
        if not due or view.has_sent(step):
            return ()
        if self.land_after_send:
            return due
        busy = {int(f.fragment) for _, f in view.flights}
        free = (s._replace(fragments=tuple(p for p in s.fragments if p not in busy)) for s in due)
        return tuple(send for send in free if send.fragments)

    def landings(self, step: int, view: View) -> Stage:
        """The stage of the payloads that land at this step at the latest, where regions are up."""
        due = [(k, f) for k, f in view.flights if bool((f.waiting & (f.due <= step)).any())]
        moves = [Move(k) for k, f in due if not f.anchor_updated]
        up = self.pace.up(step, view.regions) if due and self.pace else True
        adopts = [
            Adopt(
                int(f.fragment),
                k,
                f.takes_part & (f.due <= step) & up,
                f.takes_part & (f.due > step),
            )
            for k, f in due
        ]
        return (*moves, *adopts)

    def _copies(self, step: int, view: View) -> Stage:
        """The stage of the regions that come back after this step."""
        if not self.outages:
            return ()
        done = (view.counters.last_landed == step).all(axis=0)
        back = np.flatnonzero(self.pace.returns(step, view.regions) & ~done)
        peer = np.flatnonzero(self.pace.up(step, view.regions))
        return tuple(Copy(int(region), int(peer[0])) for region in back)

    def boundary(self, step: int, view: View) -> Stage:
        """The payload of the round before lands, and who has just sent adopts the anchor.

        At the first boundary an empty payload lands, or, with `first_round="blocking"`, the one
        just sent.
        """
        if view.crossed:
            return ()
        due = (p for send in self.due(step, view.counters) for p in send.fragments)
        return tuple(act for p in due for act in self.crossing(step, p, view))

    def crossing(self, step: int, fragment: int, view: View) -> Stage:
        """`boundary` of one fragment."""
        flights = [(k, f) for k, f in view.flights if f.fragment == fragment]
        late = next((k for k, f in flights if f.sent < step), None)
        key, fresh = next(((k, f) for k, f in flights if f.sent == step), (None, None))
        if fresh is None:
            return ()
        first = late is None and int(view.counters.sends[fragment]) == 1
        if first and self.first_round == "blocking":
            return Move(key, applied=False), Adopt(fragment, key, fresh.takes_part)
        adopts = Adopt(fragment, late, fresh.takes_part, fresh=key)
        return Move(late, key), adopts

    def next_send(self, step: int, counters: SyncCounters) -> int:
        """The first step after `step` at which a fragment is due.

        A period later where none is due within two: what lands before will decide.
        """
        steps = range(step + 1, step + 2 * self.period)
        return next((t for t in steps if self.due(t, counters)), step + self.period)

    def at_the_end(self, step: int, fragment: int, counters: SyncCounters) -> Send:
        """The send of the last synchronisation, at the step where a run ends, by all that can."""
        if self.pace is None:
            return Send((fragment,))
        able = self.able(step, fragment, counters)
        return Send((fragment,), able, step if self.copies else None)

    def able(self, step: int, fragment: int, counters: SyncCounters) -> np.ndarray:
        """Bool `[R]`: the regions at a `pace` that can take part in what is sent."""
        landed_R = np.maximum(counters.last_landed[fragment], 0)
        up = self.pace.up(step, len(landed_R))
        if not self.needs_step:
            return up
        return up & (self.pace.made(step, len(landed_R)) > self.pace.made_at(landed_R))


@dataclasses.dataclass(frozen=True)
class Staggered(Schedule):
    """Every fragment every H steps, the K fragments evenly staggered (arXiv 2501.18512, Alg. 2).

    Fragment p of K (0-based) is first sent after inner step floor((p+1) H / K), then every H steps
    exactly. K = 1 is DiLoCo's round (arXiv 2311.08105); H = 1 is synchronisation at every step.
    See `Schedule` for the other fields.

    Attributes:
      travel: inner steps that a payload needs to travel, which must not be more than a period; None
        = as the network says, if there is one; () = as long as it likes.
    """

    period: int
    fragments: int = 1
    delay: int | tuple[int, ...] = 0
    land_after_send: bool = False
    travel: tuple[int, ...] | None = ()
    first_round: FirstRound = "empty"
    by_steps = True

    def first(self, fragment: int) -> int:
        """Inner step (1-based) after which a fragment leaves for the first time."""
        return (fragment + 1) * self.period // self.fragments

    def due(self, step: int, counters: SyncCounters) -> tuple[Send, ...]:
        del counters
        since = ((p, step - self.first(p)) for p in range(self.fragments))
        return tuple(Send((p,)) for p, t in since if t >= 0 and t % self.period == 0)

    def violations(self, regions: int) -> list[str]:
        return common_violations(self, regions, "overlap") + overlap_violations(self)


class Remembering(Schedule):
    """A schedule that decides by what lands, and remembers it."""

    remembers: bool = True

    @abc.abstractmethod
    def start(self) -> Decided:
        """What it remembers, `SyncCounters.decided`, before the first step."""

    @abc.abstractmethod
    def decide(self, step: int, counters: SyncCounters, landings: Sequence[Any]) -> Decided | None:
        """The new `SyncCounters.decided` after a step's sends and landings; None = as it was.

        An implementation reads reduced data only, so that all regions decide alike.

        Args:
          landings: `history.Event` of the step's landings; fetching their values waits for the
            device.
        """


class Paced(Schedule):
    """A schedule of regions at a pace of their own, which may also be jobs of their own.

    On one mesh the step is a tick, of the fastest region, and settings say who steps when. Between
    jobs regions have rounds in common and no steps: `View.agreed` has what the records of rounds
    say, and everything else follows from this region's own steps. The loop asks `acts_by_rounds`
    after each of them, in place of `acts`; `experiments` asks `opens` and `rounds_by` how long a
    run is. The first region that can writes the record of a round.
    """

    speeds: tuple[float, ...] | None = ()
    by_rounds: bool = True

    @abc.abstractmethod
    def acts_by_rounds(self, step: int, view: View) -> Stage:
        """`acts` of a region that is a job, where `view.agreed` is given.

        Round `agreed.landed` may land once it has `arrived`: by a Move of the payload `agreed.key`
        and an Adopt. A Send is this region's report to the next round of that fragment. A Wait,
        alone in its stage, stands still until the next round is here. A Drop takes a payload back
        at the end.
        """

    @abc.abstractmethod
    def opens(self, number: int) -> int:
        """The tick at which round `number` opens, from 0, as far as the settings say."""

    @abc.abstractmethod
    def rounds_by(self, step: int) -> int:
        """How many rounds open until a tick, itself included: those of a run of so many steps."""


def delay_per_region(delay: int | tuple[int, ...], regions: int) -> np.ndarray:
    """tau of each region, int64 `[R]`."""
    return np.broadcast_to(np.asarray(delay, np.int64), (regions,))


def common_violations(schedule: Schedule, regions: int, overlap_name: str) -> list[str]:
    """Checks that schedules of a period share, one line with its fix each.

    K <= H; tau >= 0, one or R of them; and tau < H unless payloads land after the step's send.

    Args:
      overlap_name: what the user calls tau.
    """
    period, fragments, delay = schedule.period, schedule.fragments, schedule.delay
    numbers = [at_least("period", period, 1), at_least("fragments", fragments, 1)]
    problems = [line for line in numbers if line is not None]
    if not problems and fragments > period:
        problems.append(
            f"fragments={fragments} > period={period}: two fragments would be due at one step; use "
            f"fragments <= {period}"
        )
    if schedule.first_round not in get_args(FirstRound):
        problems.append(f"first_round={schedule.first_round!r}: use empty, blocking")
    also = "" if overlap_name == "delay" else f" ({overlap_name} is the schedule's `delay`)"
    delays = np.ravel(np.asarray(delay, object)).tolist()
    if not all(is_whole(tau) and tau >= 0 for tau in delays):
        problems.append(f"{overlap_name}={delay!r}: give whole numbers of at least 0{also}")
        return problems
    if len(delays) not in (1, regions):
        problems.append(
            f"{overlap_name}: {len(delays)} values for {regions} regions; give 1 or {regions}{also}"
        )
    late = not schedule.land_after_send and at_least("period", period, 1) is None
    if late and max(delays, default=0) >= period:
        problems.append(
            f"{overlap_name}={delay} >= period={period}: a fragment would still be in flight when "
            f"it is due again; use at most {period - 1}{also}"
        )
    return problems


def paced_violations(schedule: Schedule, regions: int) -> list[str]:
    """Checks that schedules share whose regions have speeds, and may have a switch `dynamic`."""
    switch = SWITCH.problem("dynamic", getattr(schedule, "dynamic", False))
    problems = common_violations(schedule, regions, "delay")
    problems += Pace(schedule.speeds, schedule.outages).violations(regions)
    return problems if switch is None else [*problems, switch]


def overlap_violations(schedule: Schedule) -> list[str]:
    """T_comm <= H T_step: a payload must arrive before the round during which it travels ends."""
    travel = max(schedule.travel or (), default=0)
    if at_least("period", schedule.period, 1) is not None or travel <= schedule.period:
        return []
    return [
        f"period={schedule.period}: the payload travels for {travel} inner steps, longer than "
        f"a round hides; use period >= {travel}, a lower rank or a faster link"
    ]
