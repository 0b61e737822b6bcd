"""`BatchPolicy`: the contract of a batch policy; `Fixed`: the one that never changes the batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from lowcomm_jax.batching.statistics import Scope, Statistics

State = dict[str, float]


@runtime_checkable
class BatchPolicy(Protocol):
    """Decides how many samples a region's next optimizer steps take.

    Attributes:
      start: samples of a region's first steps.
      cap: most samples of a step; None = no limit.
      shares: R positive numbers, how the regions share a step; None = equally (`Switch`).
      microbatches: gradients that each region measures per decision; 0 where nothing is measured.
      scope: the mean that deviations are measured from, see `Statistics`.
    """

    @property
    def start(self) -> int: ...

    @property
    def cap(self) -> int | None: ...

    @property
    def shares(self) -> Sequence[float] | None: ...

    @property
    def microbatches(self) -> int: ...

    @property
    def scope(self) -> Scope: ...

    @property
    def adapts(self) -> bool:
        """Whether `decide` needs statistics; else nothing is measured."""
        ...

    def violations(self, regions: int) -> list[str]:
        """Settings that cannot work, one line with its fix each."""
        ...

    def init(self) -> State:
        """What the policy remembers before the first decision, plain floats by name."""
        ...

    def decide(self, state: State, statistics: Statistics, batch: int) -> tuple[State, int]:
        """The next batch (samples a region and step); a pure function of reduced data."""
        ...


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Always `start` samples.

    Attributes:
      start: samples of a region's step.
      shares: R positive numbers, how regions of uneven hardware share a step; None = equally.
    """

    start: int
    shares: Sequence[float] | None = None

    @property
    def microbatches(self) -> int:
        return 0

    @property
    def scope(self) -> Scope:
        return "within"

    @property
    def cap(self) -> int:
        """`start`: the batch never grows."""
        return self.start

    @property
    def adapts(self) -> bool:
        """False: no statistics are needed."""
        return False

    def violations(self, regions: int) -> list[str]:
        """Settings that cannot work, one line with its fix each."""
        return size_violations(self.start, None, self.shares, regions)

    def init(self) -> State:
        """Nothing: there is no state."""
        return {}

    def decide(self, state: State, statistics: Statistics, batch: int) -> tuple[State, int]:
        """The state and batch as they are."""
        del statistics
        return state, batch


def size_violations(
    start: Any, cap: Any, shares: Sequence[float] | None, regions: int
) -> list[str]:
    """What is wrong with batch sizes and shares."""
    found = []
    counts = {"start": start} if cap is None else {"start": start, "cap": cap}
    for name, value in counts.items():
        if not isinstance(value, int) or value < 1:
            found.append(f"{name}={value}: a whole number of samples, at least 1, is needed")
    if not found and cap is not None and cap < start:
        found.append(f"cap={cap} is below start={start}: use cap={start}, or start={cap}")
    if shares is not None:
        fine = len(shares) == regions and all(math.isfinite(s) and s > 0 for s in shares)
        if not fine:
            found.append(f"shares={tuple(shares)}: give {regions} positive numbers, one a region")
    return found
