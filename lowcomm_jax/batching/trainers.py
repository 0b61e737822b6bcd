r"""Several trainers in a region, and when and how they merge (AdLoCo, arXiv 2508.18182).

A trainer is a model instance of its own: parameters, inner state, outer anchor and momentum,
requested batch and data stream, in every region. Trainer i of a region synchronises with trainer i
of the others. Every `merge_every` rounds two of them become one,

$$x \leftarrow \frac{\sum_{j \in M} b_j x_j}{\sum_{j \in M} b_j}$$

with b_j the requested batches, so that the trainer with the smaller request counts for less.

Source: the paper, and the authors' code (repository funmagster/AdLoCo) for the choice of the pair
and for what the survivor keeps: its outer optimizer's state and its requested batch.

Differs from the code: a merge comes before a round, not at its end. Floating-point leaves are
averaged, and integers (counters, keys) are the survivor's. Inner moments are merged or reset. A
merge that raises the loss too much can be undone (`hurt_bound`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

CHOICES = ("worst_with_worst", "best_with_worst")
MOMENTS = ("merge", "reset")


@dataclasses.dataclass(frozen=True)
class Trainers:
    """How many trainers a region starts with, and how they become fewer.

    Attributes:
      count: trainers at the start.
      merge_every: rounds between two merges; None = never.
      choose: `worst_with_worst`, the two smallest requests, of which the larger one's trainer
        survives; or `best_with_worst`, the smallest merges into the largest. Of equal requests
        the higher number counts as the smaller.
      moments: what becomes of the inner optimizer's floating-point state: weighted as the
        parameters are (`merge`), or as at step 0 (`reset`; counts of learning-rate schedules go
        on).
      hurt_bound: largest rise of the loss that a merge may cause, over the better one of the two
        (`AdaptiveEngine.run(evaluate=)`); what rises more is undone. None = no bound.
      threshold: of `batching.Switch`: requests above so many memory caps are accumulated.
    """

    count: int
    merge_every: int | None = 2
    choose: Literal["worst_with_worst", "best_with_worst"] = "worst_with_worst"
    moments: Literal["merge", "reset"] = "merge"
    hurt_bound: float | None = None
    threshold: float = 2.0

    def violations(self) -> list[str]:
        """What cannot work, one line with its fix each."""
        found = [
            f"{name}={value!r}: use {' or '.join(known)}"
            for name, value, known in (
                ("choose", self.choose, CHOICES),
                ("moments", self.moments, MOMENTS),
            )
            if value not in known
        ]
        if not _whole(self.count):
            found.append(f"trainers={self.count!r}: a whole number, at least 1, is needed")
        if self.merge_every is not None and not _whole(self.merge_every):
            found.append(
                f"merge_every={self.merge_every!r}: give rounds, a whole number from 1, or None "
                "for no merge"
            )
        bound = self.hurt_bound
        if bound is not None and not (isinstance(bound, float | int) and 0 <= bound < math.inf):
            found.append(f"hurt_bound={bound!r}: give a rise of the loss from 0, or None")
        return found

    def merges_at(self, round_: int, trainers: int) -> bool:
        """Whether two of `trainers` are to merge before round `round_` (0-based)."""
        every = self.merge_every
        return every is not None and trainers > 1 and round_ > 0 and round_ % every == 0

    def pair(self, requests: Mapping[int, int]) -> tuple[int, int]:
        """(survivor, retired) of at least two trainers.

        Args:
          requests: trainer's number -> requested batch.
        """
        ranked = sorted(requests, key=lambda i: (requests[i], -i))
        return ranked[1 if self.choose == "worst_with_worst" else -1], ranked[0]


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
