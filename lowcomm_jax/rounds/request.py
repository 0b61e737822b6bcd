"""The request for a round, and its result.

`RemoteExchange` and `RoundExchange` make an `ExchangeRequest`; `AgreedRound` and `TwoShotExchange`
bring everyone's arrays for it; `arrange` puts those into rows, the `Arrived` that callers get.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lowcomm_jax.rounds.slicing import Slicing
from lowcomm_jax.store import wire
from lowcomm_jax.store.wire import Arrays, side_by_side


def _nobody(region: int) -> bool:
    return False


@dataclasses.dataclass(frozen=True)
class ExchangeRequest:
    """One round as this region takes part in it: all in which rounds differ.

    Attributes:
      key, name: its name for the caller, and in the store.
      members: regions of the group, ascending.
      arrays: of this region, `[1, ...]`.
      takes_part: publish them, or announce absence.
      terms: values that must be the same in all regions that take part (`terms`).
      joins: False = only read a commit record that exists.
      reduction: how payloads are reduced in slices; None = every region gets all payloads.
      like: shapes of each region's payload, of what every region gets of it; None = any.
      awaited: whether to wait for a region that has announced nothing.
      least, most: payloads that the record names, `least` of regions that agree; None = of all.
      confirmed: whether all that are admitted confirm that they hold each other's payloads. Where
        they do not, payloads outlive the jobs that wrote them.
      window_s: seconds for which the awaited are waited for, once `least` payloads are here; None =
        those of `Pace`, while the loop waits.
      clock: seconds, for these waits; None = those for which the others could be observed.
      teaches: whether its waits say how late regions are. Not where it continues another round, so
        that no region computes before it, nor where regions have no steps in common.
      patience_s: seconds that other regions may compute longer than usual.
    """

    key: str
    name: str
    members: tuple[int, ...]
    arrays: dict[str, Any] = dataclasses.field(default_factory=dict)
    takes_part: bool = False
    terms: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    joins: bool = True
    reduction: Slicing | None = None
    like: dict[int, wire.Shapes] | None = None
    awaited: Callable[[int], bool] = _nobody
    least: int = 0
    most: int | None = None
    confirmed: bool = True
    window_s: Callable[[], float] | None = None
    clock: Callable[[], float] | None = None
    teaches: bool = True
    patience_s: float = 0.0


@dataclasses.dataclass
class Due:
    """Whether the wait for others is limited: the loop waits for the outcome, or a window runs.

    Attributes:
      since_s: since when, on the clock of the round; None = the loop computes.
    """

    since_s: float | None = None

    def begin(self, now_s: float) -> None:
        """The loop waits from now on, if it did not before."""
        if self.since_s is None:
            self.since_s = now_s

    def end(self) -> None:
        """It computes again."""
        self.since_s = None


@dataclasses.dataclass(frozen=True)
class Arrived:
    """The end of an exchange, in rows; the same in every region, apart from `ours` and seconds.

    Attributes:
      participants: bool `[R]`, as the commit record says; False outside the group.
      ours: whether it names what this job has published. A payload of the job that was here before
        counts, but leaves this job's values and residual as if it had not sent.
      arrays: `[R, ...]` each; zeros for regions that did not take part.
      reduced: `[parts, ...]`, of payloads that were reduced in slices; `arrays` are then the arrays
        beside the slices.
      seconds: from this region's payload being computed to the arrival of the last payload.
      waited: seconds for which the loop was blocked, in `finish` and in looking for arrivals.
    """

    participants: np.ndarray
    ours: bool
    arrays: Arrays
    reduced: Arrays | None
    seconds: float
    waited: float


def problems(key: str, group: tuple[int, ...], region: int, count: int) -> list[str]:
    """One line for each reason why this region cannot exchange this key in this group."""
    wrong = [] if key else ["the key is empty"]
    if len(set(group)) != len(group) or not set(group) <= set(range(count)):
        wrong.append(f"members {group} must be different regions of 0..{count - 1}")
    if region not in group:
        wrong.append(f"members {group} must contain this region, {region}")
    return wrong


def arrange(
    by_region: Mapping[int, Arrays],
    like: wire.Shapes,
    count: int,
    ours: bool = False,
    reduced: Arrays | None = None,
    seconds: float = 0.0,
    waited: float = 0.0,
) -> Arrived:
    """Put the arrays of the regions that took part into rows; the rest as in `Arrived`.

    Args:
      by_region: their arrays, `like` these (`Fetch` has looked).
      like: dtypes and shapes of one region's.
      count: number of regions.
    """
    participants = np.zeros(count, bool)
    participants[list(by_region)] = True
    rows = side_by_side(by_region, count, like)
    return Arrived(participants, ours, rows, reduced, seconds, waited)
