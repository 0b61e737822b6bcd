"""The contract of a schedule: which acts are to be done after a step, and in which order.

After every inner step the loop asks `Schedule.acts` for a stage, a tuple of acts, and does them,
until there is none. A schedule reads counters, decisions and payloads in flight (`View`), never an
array, so that every region decides alike. It is a frozen dataclass; what it remembers between steps
is `SyncCounters.decided`. The loop stores that, checkpoints keep it, and `Schedule.decide` changes
it (for `TwoLevels` the loop itself).

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

from lowcomm_jax.network.collectives import derive_tau
from lowcomm_jax.state.train_state import Decided, InFlight, SyncCounters, flight_key

FirstRound = Literal["empty", "blocking"]
Rates = Callable[[], np.ndarray]
"""Fetches a statistic of the fragments, float32 `[K]`; it may wait for the device."""


class Send(NamedTuple):
    """Measure the pseudo-gradient of a fragment, encode it and put it in flight.

    Attributes:
      fragments: those that may leave; of several, `Schedule.choose` picks one when the act is done.
      admitted: bool `[R]`, who may take part; None = all.
      lands: the step at which it lands in all regions, whoever took part; None = after the delay of
        each, in those that took part.
    """

    fragments: tuple[int, ...]
    admitted: np.ndarray | None = None
    lands: int | None = None


class Move(NamedTuple):
    """Move the anchor by a payload.

    Attributes:
      key: of the payload; None = an empty one, so that momentum alone moves the anchor.
      fresh: key of the payload that was just sent, for rules that apply a region's own part apart.
    """

    key: str | None
    fresh: str | None = None


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
      weights: `token_rate`: c_tokens (c_tokens / c_steps), tokens and steps since the learner
        received the fragment; or as `given` to the engine.
    """

    quorum: int = 1
    grace: float = 0.0
    weights: Literal["token_rate", "given"] = "token_rate"

    def violations(self, regions: int) -> list[str]:
        """Settings that cannot work, one line with its fix each."""
        found = []
        if not 1 <= self.quorum <= regions:
            found.append(
                f"quorum={self.quorum}: give a number from 1 to the number of regions ({regions})"
            )
        if not 0 <= self.grace < 1:
            found.append(f"grace={self.grace}: give a share of the slack, from 0 to below 1")
        if self.weights not in ("token_rate", "given"):
            found.append(f"weights={self.weights!r}: use token_rate or given")
        return found


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
      agreed: where records of rounds say what lands, instead of steps (`Paced`); None = steps do.
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


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of a step and of a synchronisation on a network, without jitter.

    Attributes:
      step_seconds: T_c, seconds of an inner step of the slowest region.
      sync_seconds: (fragment, level of the codec) -> T_s, seconds to synchronise that fragment.
    """

    step_seconds: float
    sync_seconds: Callable[[int, int], float]


class Schedule(abc.ABC):
    """Decides, on the host and alike in every region, which fragments leave after a step.

    Attributes:
      period: H, inner optimizer steps between two syncs of the same parameters.
      fragments: K.
      delay: tau, inner steps between send and landing; one int, or one per region.
      land_after_send: the due payload lands after the send of the same step, so that the new
        pseudo-gradient is measured before the anchor moves. For methods that overlap a whole
        period: a fragment in flight is sent again, and lands at the next boundary.
      statistic: what `choose` goes by, reduced over the regions at every landing. `none`:
        nothing. `rate`: the change of the fragment that lands. `drift`: that of every fragment,
        which travels in the payloads' headers.
      warm_up: periods that are measured before what `decide` has seen counts.
      needs_network: whether a setting is missing that only a network gives (`settle`).
      measured: whether the run measures the seconds of a step and of a synchronisation; they travel
        in the headers, too.
      by_steps: whether the step alone decides what is sent, whatever has landed.
      never_sends: whether there is no main exchange, for methods of channels alone.
      uneven: whether regions make different numbers of inner steps (`made`). Between jobs that
        takes a schedule that goes `by_rounds`.
      by_rounds: whether regions that are jobs have rounds in common, and no steps (`Paced`).
      most: regions that one landing, or one round between jobs, admits at most, those that came
        first; None = all. With 1 each region arrives alone, and between jobs it stands still from
        its send until that lands.
      simulated: names of settings that say how regions fare in one program, and that jobs find out
        by themselves.
      copies: whether regions that come back copy a peer (`Copy`).
      local_servers: whether regions arrive at local servers; their loop reads what `TwoLevels` has.
      by_token_rate: whether regions are weighted by tokens x tokens / steps since the fragment
        landed there (`made`).
      first_round: what the first boundary of a one-period method lands: an `empty` payload, or
        (`blocking`) the one just sent.
      energy: share of the squared norm by which the rank of every reduced payload is measured, for
        schedules that follow it; None = not measured.
    """

    period: int
    fragments: int
    delay: int | tuple[int, ...]
    land_after_send: bool = False
    statistic: Literal["none", "rate", "drift"] = "none"
    warm_up: int = 0
    needs_network: bool = False
    measured: bool = False
    by_steps: bool = False
    never_sends: bool = False
    uneven: bool = False
    by_rounds: bool = False
    most: int | None = None
    simulated: tuple[str, ...] = ()
    copies: bool = False
    local_servers: bool = False
    by_token_rate: bool = False
    first_round: FirstRound = "empty"
    energy: float | None = None

    def settle(self, timing: Timing) -> Schedule:
        """The same schedule, with the settings that a network gives filled in from its timing."""

        del timing
        return self

    def start(self) -> Decided:
        """What the schedule itself remembers, `SyncCounters.decided`, before the first step."""
        return {}

    @property
    def cycle(self) -> int:
        """Inner steps after which its acts repeat, as far as the settings say."""
        return self.period

    def header_floats(self) -> int:
        """How many fp32 numbers travel with every payload."""
        drift = self.fragments if self.statistic == "drift" else 0
        return drift + (2 if self.measured else 0)

    @abc.abstractmethod
    def due(self, step: int, counters: SyncCounters) -> tuple[int, ...]:
        """Fragments of which one or all may leave after inner step `step`, if not in flight."""

    def choose(
        self, step: int, counters: SyncCounters, ready: tuple[int, ...], rates: Rates
    ) -> int:
        """The one of several fragments (`Send.fragments`) that leaves.

        Args:
          rates: of the schedule's `statistic`.
        """
        del step, counters, rates
        return ready[0]

    def acts(self, step: int, view: View) -> Stage:
        """What is still to be done after inner step `step`; () = nothing, so that the step is done.

        First payloads of earlier steps land, then fragments leave, then payloads without delay
        land. Where payloads land after the send of the same step, the new pseudo-gradient is
        measured before the anchor moves.
        """
        if self.land_after_send:
            return self.sends(step, view) or self.boundary(step, view)
        return self.landings(step, view) or self.sends(step, view)

    def sends(self, step: int, view: View) -> Stage:
        """The stage of the sends, each of one fragment."""
        if view.has_sent(step):
            return ()
        busy = set() if self.land_after_send else {int(f.fragment) for _, f in view.flights}
        return tuple(Send((p,)) for p in self.due(step, view.counters) if p not in busy)

    def landings(self, step: int, view: View) -> Stage:
        """The stage of the payloads that land at this step at the latest."""
        due = [(k, f) for k, f in view.flights if bool((f.waiting & (f.due <= step)).any())]
        moves = [Move(k) for k, f in due if not f.anchor_updated]
        adopts = [
            Adopt(int(f.fragment), k, f.takes_part & (f.due <= step), f.takes_part & (f.due > step))
            for k, f in due
        ]
        return (*moves, *adopts)

    def boundary(self, step: int, view: View) -> Stage:
        """The payload of the round before lands, and who has just sent adopts the anchor.

        At the first boundary an empty payload lands, or, with `first_round="blocking"`, the one
        just sent.
        """
        if view.crossed:
            return ()
        crossings = (self.crossing(step, p, view) for p in self.due(step, view.counters))
        return tuple(act for acts in crossings for act in acts)

    def crossing(self, step: int, fragment: int, view: View) -> Stage:
        """`boundary` of one fragment."""
        flights = [(k, f) for k, f in view.flights if f.fragment == fragment]
        late = next((k for k, f in flights if f.sent < step), None)
        key, fresh = next(((k, f) for k, f in flights if f.sent == step), (None, None))
        if fresh is None:
            return ()
        first = late is None and int(view.counters.sends[fragment]) == 1
        if first and self.first_round == "blocking":
            return Move(key), Adopt(fragment, key, fresh.takes_part)
        adopts = Adopt(fragment, late, fresh.takes_part, fresh=key)
        return Move(late, key), adopts

    def next_send(self, step: int, counters: SyncCounters) -> int:
        """The first step after `step` at which a fragment is due.

        A period later where none is due within two: what lands before will decide.
        """
        steps = range(step + 1, step + 2 * self.period)
        return next((t for t in steps if self.due(t, counters)), step + self.period)

    def at_the_end(self, step: int, fragment: int, counters: SyncCounters) -> Send:
        """The send of the last synchronisation, at the step where a run ends."""
        del step, counters
        return Send((fragment,))

    def level(self, counters: SyncCounters) -> int:
        """Level of the codec (`Codec.at`) for a payload that leaves now; 0 = the first."""
        del counters
        return 0

    def decide(self, step: int, counters: SyncCounters, landings: Sequence[Any]) -> Decided | None:
        """The new `SyncCounters.decided` after a step's sends and landings; None = as it was.

        An implementation reads reduced data only, so that all regions decide alike.

        Args:
          landings: `history.Event` of the step's landings; fetching their values waits for the
            device.
        """
        del step, counters, landings
        return None

    @abc.abstractmethod
    def violations(self, regions: int) -> list[str]:
        """What is wrong with the settings, one line with its fix each."""

    def made(self, step: int, regions: int) -> np.ndarray:
        """Inner steps that each region has made by the end of `step`, int64 `[R]`."""
        return np.full(regions, step)

    def made_at(self, step_R: np.ndarray) -> np.ndarray:
        """`made` of each region by the end of a step of its own, int64 `[R]`."""
        return np.array([self.made(int(t), len(step_R))[r] for r, t in enumerate(step_R)])

    def active(self, step: int, regions: int) -> np.ndarray:
        """Bool `[R]`: the regions that make an inner step at `step`."""
        return self.made(step, regions) > self.made(step - 1, regions)


class Paced(Schedule):
    """A schedule of regions at a pace of their own, which may also be jobs of their own.

    On one mesh the step is a tick, of the fastest region, and settings say who steps when. Between
    jobs regions have rounds in common and no steps: `View.agreed` has what the records of rounds
    say, and everything else follows from this region's own steps. `RoundCarrier` (`jobs`) asks
    `acts` after each of them; `experiments` asks `opens` and `rounds_by` how long a run is.

    Attributes:
      admission: for whom a round waits. The first region that can writes its record.
    """

    uneven: bool = True
    by_rounds: bool = True
    admission: Admission

    def acts(self, step: int, view: View) -> Stage:
        """As `Schedule.acts`; between jobs `acts_by_rounds`."""
        return super().acts(step, view) if view.agreed is None else self.acts_by_rounds(step, view)

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
    problems = [
        f"{name}={value}: must be a whole number of inner steps"
        for name, value in (("period", schedule.period), (overlap_name, schedule.delay))
        if not np.issubdtype(np.asarray(value).dtype, np.integer)
    ]
    if schedule.first_round not in get_args(FirstRound):
        problems.append(f"first_round={schedule.first_round!r}: use empty, blocking")
    if not isinstance(schedule.fragments, int):
        problems.append(f"fragments={schedule.fragments}: must be a whole number")
    if problems:
        return problems
    if schedule.period < 1:
        problems.append(f"period={schedule.period}: at least 1 inner step is needed")
    if schedule.fragments < 1:
        problems.append(f"fragments={schedule.fragments}: at least 1 is needed")
    if schedule.fragments > schedule.period >= 1:
        problems.append(
            f"fragments={schedule.fragments} > period={schedule.period}: two fragments would be "
            f"due at one step; use fragments <= {schedule.period}"
        )
    delays = np.atleast_1d(np.asarray(schedule.delay))
    if delays.size not in (1, regions):
        problems.append(
            f"{overlap_name}: {delays.size} values for {regions} regions; give 1 or {regions}"
        )
    if (delays < 0).any():
        problems.append(f"{overlap_name}={schedule.delay}: must not be negative; use 0 or more")
    if not schedule.land_after_send and (delays >= schedule.period).any() and schedule.period > 0:
        problems.append(
            f"{overlap_name}={schedule.delay} >= period={schedule.period}: a fragment would still "
            f"be in flight when it is due again; use at most {schedule.period - 1}"
        )
    also = "" if overlap_name == "delay" else f" ({overlap_name} is the schedule's `delay`)"
    return [line + also if line.startswith(overlap_name) else line for line in problems]


def steps_to_travel(timing: Timing, fragment: int, level: int = 0) -> int:
    """Inner steps that a payload needs to travel: ceil(T_comm / T_step)."""
    return derive_tau(timing.sync_seconds(fragment, level), timing.step_seconds)


def overlap_violations(travel: int, period: int) -> list[str]:
    """T_comm <= H T_step: a payload must arrive before the round during which it travels ends."""
    if travel <= period:
        return []
    return [
        f"period={period}: the payload travels for {travel} inner steps, longer than "
        f"a round hides; use period >= {travel}, a lower rank or a faster link"
    ]
