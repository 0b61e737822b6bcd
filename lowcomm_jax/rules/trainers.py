r"""Several trainers in a region, and when and how they merge (AdLoCo, arXiv 2508.18182).

A trainer is a model instance of its own: parameters, inner state, outer anchor and momentum,
requested batch and data stream, in every region. Trainer i of a region synchronises with trainer i
of the others. Every `merge_every` rounds two of them become one,

$$x \leftarrow \frac{\sum_{j \in M} b_j x_j}{\sum_{j \in M} b_j}$$

with b_j the requested batches, so that the trainer with the smaller request counts for less. These
two are those with the smallest requests, and the one with the larger request survives.

Source: the paper, and the authors' code (repository funmagster/AdLoCo) for how many merge at once
and for what the survivor keeps: its outer optimizer's state and its requested batch. Merging the
smallest into the largest, an option of that code, is left out.

Differs from the code: a merge comes before a round, not at its end. Floating-point leaves are
averaged, and integers (counters, keys) are the survivor's. Inner moments are averaged, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from lowcomm_jax.refused import is_number, is_whole


@dataclasses.dataclass(frozen=True)
class Trainers:
    """How many trainers a region starts with, and how they become fewer.

    Attributes:
      count: trainers at the start.
      merge_every: rounds between two merges; None = never.
      threshold: requests above so many of the largest microbatches are accumulated; those between
        are cut to one.
    """

    count: int
    merge_every: int | None = 2
    threshold: float = 2.0

    def violations(self) -> list[str]:
        """What cannot work, one line with its fix each."""
        found, count, every = [], self.count, self.merge_every
        if not (is_whole(count) and count >= 1):
            found.append(f"trainers={count!r}: a whole number, at least 1, is needed")
        if every is not None and not (is_whole(every) and every >= 1):
            fix = "give rounds, a whole number from 1, or None for no merge"
            found.append(f"merge_every={every!r}: {fix}")
        if not (is_number(self.threshold) and self.threshold >= 1):
            found.append(f"threshold={self.threshold}: a number, at least 1, is needed")
        return found

    def merges_at(self, round_: int, trainers: int) -> bool:
        """Whether two of `trainers` are to merge before round `round_` (0-based)."""
        every = self.merge_every
        return every is not None and trainers > 1 and round_ > 0 and round_ % every == 0

    def ranked(self, requests: Mapping[int, int]) -> list[int]:
        """Numbers of trainers, largest request first; each survives a merge with those behind it.

        The last two merge first. Of equal requests the lower number survives.

        Args:
          requests: trainer's number -> requested batch.
        """
        return sorted(requests, key=lambda i: (-requests[i], i))
