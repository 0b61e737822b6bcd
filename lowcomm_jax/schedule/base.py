"""The contract of a schedule, and the checks that schedules share.

A `Schedule` takes the step and the counters of the training state (`SyncCounters`) and returns
which fragments leave and when. It is a frozen dataclass; what it remembers between steps is
`SyncCounters.decided`. The loop stores that, checkpoints keep it, and `Schedule.decide` changes it
(for `TwoLevels` the loop itself).
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence, Set
from typing import Any, Literal, get_args

import numpy as np

from lowcomm_jax.state.train_state import Decided, SyncCounters

FirstRound = Literal["empty", "blocking"]
Rates = Callable[[], np.ndarray]
"""Fetches a statistic of the fragments, float32 `[K]`; it may wait for the device."""


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
        period.
      statistic: what `sends` chooses by, reduced over the regions at every landing. `none`:
        nothing. `rate`: the change of the fragment that lands. `drift`: that of every fragment,
        which travels in the payloads' headers.
      needs_network: whether a setting is missing that only a network gives (`settle`).
      measured: whether the run measures the seconds of a step and of a synchronisation; they travel
        in the headers, too.
      by_steps: whether the step alone decides what is sent, whatever has landed.
      uneven: whether regions make different numbers of inner steps (`active`, `senders`).
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
    needs_network: bool = False
    measured: bool = False
    by_steps: bool = False
    uneven: bool = False
    first_round: FirstRound = "empty"
    energy: float | None = None

    def settle(self, timing: Timing) -> Schedule:
        """The same schedule, with the settings that a network gives filled in from its timing."""

        del timing
        return self

    def start(self) -> Decided:
        """What the schedule itself remembers, `SyncCounters.decided`, before the first step."""
        return {}

    def header_floats(self) -> int:
        """How many fp32 numbers travel with every payload."""
        drift = self.fragments if self.statistic == "drift" else 0
        return drift + (2 if self.measured else 0)

    @abc.abstractmethod
    def next_send(self, step: int, counters: SyncCounters) -> int:
        """First step after `step` at which something may be sent."""

    @abc.abstractmethod
    def sends(
        self, step: int, counters: SyncCounters, in_flight: Set[int], rates: Rates
    ) -> tuple[int, ...]:
        """Fragments that leave after inner step `step`.

        Args:
          in_flight: fragments in flight. `Staggered` and `Adaptive` never send one of these.
          rates: of the schedule's `statistic`.
        """

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

    def active(self, step: int, regions: int) -> np.ndarray:
        """Bool `[R]`: the regions that make an inner step at `step`."""
        del step
        return np.ones(regions, bool)

    def senders(self, step: int, regions: int) -> np.ndarray:
        """Bool `[R]`: the regions that send at `step`, if anything is sent."""
        del step
        return np.ones(regions, bool)


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
    return math.ceil(timing.sync_seconds(fragment, level) / timing.step_seconds - 1e-9)


def overlap_violations(travel: int, period: int) -> list[str]:
    """T_comm <= H T_step: a payload must arrive before the round during which it travels ends."""
    if travel <= period:
        return []
    return [
        f"period={period}: the payload travels for {travel} inner steps, longer than "
        f"a round hides; use period >= {travel}, a lower rank or a faster link"
    ]
