r"""DiLoCoX's AdaGradCmp (arXiv 2506.21263): rank and length of a round follow the measured rank.

With r'_i the measured rank of the mean pseudo-gradient of round i and a window of c rounds,

.. math::
   r_{t} = \frac1c \sum_{i=t-c}^{t-1} r'_i, \qquad
   \alpha = r_t / r_1, \qquad H_t = \alpha H_1,

once c rounds have been measured; r_1 and H_1 until then. The loop decides the next round's rank and
length at a boundary, from what has landed by then.

Differs from the paper, whose listing we had not:

- The rank is rounded up to a bucket, so that each bucket compiles once; the smallest is the floor.
- A round is never longer than H_1 nor shorter than `shortest`.
- Nor is it shorter than the payload that leaves at its start needs to travel: T_comm <= H T_step.
  That payload has the rank of the round before.
- r' is at most the rank that was sent, so that the paper's rule can only lower the rank. With
  `probe` every `probe`-th round is sent one bucket higher, so that the rank can rise again.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from lowcomm_jax.refused import at_least, is_whole
from lowcomm_jax.schedule.base import (
    FirstRound,
    Remembering,
    Send,
    common_violations,
    overlap_violations,
)
from lowcomm_jax.state.train_state import Decided, SyncCounters

_ROUNDING = 1e-5  # relative; a measured rank is a mean in fp32


@dataclasses.dataclass(frozen=True)
class Ranked(Remembering):
    """Rounds whose rank and length follow the measured rank. See `Schedule` for other fields.

    Attributes:
      period: H_1, inner steps of the first rounds, and of the longest.
      ranks: the buckets, falling; the first is r_1.
      window: c, rounds whose measured ranks are averaged.
      shortest: the fewest steps of a round.
      travel: inner steps the payload of each rank needs to travel, ceil(T_comm / T_step); None = as
        the network says, if there is one; () = none travels behind a round.
      probe: rounds from one probing round to the next; None = never.
    """

    period: int
    ranks: tuple[int, ...] = dataclasses.field()  # without a default
    window: int = 5
    shortest: int = 1
    travel: tuple[int, ...] | None = ()
    probe: int | None = None
    delay: int = 0
    land_after_send: bool = False
    fragments: int = 1
    first_round: FirstRound = "empty"
    energy: float = 0.95

    def start(self) -> Decided:
        return {
            "boundary": np.int64(self.period),
            "level": np.int64(0),
            "rounds": np.int64(1),
            # A round that told nothing (nobody took part) is not in the window.
            "measured": np.zeros(self.window, np.float32),
            "known": np.int64(0),
        }

    def due(self, step: int, counters: SyncCounters) -> tuple[Send, ...]:
        return (Send((0,)),) if step == counters.decided["boundary"] else ()

    def decide(self, step: int, counters: SyncCounters, landings: Sequence[Any]) -> Decided | None:
        now = counters.decided
        if step != now["boundary"]:
            return None
        measured, known = now["measured"], int(now["known"])
        for rank in (float(np.asarray(e.values["rank"])) for e in landings if "rank" in e.values):
            if rank > 0:
                measured = np.append(measured[1:], np.float32(rank))
                known = min(known + 1, self.window)
        level, length = self.round_after(measured if known == self.window else None)
        # What leaves now, at the level of the round that ends, travels during the next round.
        length = min(self.period, max(length, self._travel(int(now["level"]))))
        rounds = int(now["rounds"]) + 1
        if self.probe is not None and rounds % self.probe == 0 and level > 0:
            level -= 1
        return {
            "boundary": np.int64(step + length),
            "level": np.int64(level),
            "rounds": np.int64(rounds),
            "measured": measured,
            "known": np.int64(known),
        }

    def round_after(self, measured: np.ndarray | None) -> tuple[int, int]:
        """Level and length of a round, before the bound by what travels during it.

        Args:
          measured: float32 `[window]`, ranks of the last rounds; None = not yet measured.

        Returns:
          (level of the codec, inner steps).
        """
        if measured is None:
            return 0, self.period
        rank = min(float(np.mean(measured, dtype=np.float64)), self.ranks[0])
        enough = rank * (1 - _ROUNDING)
        level = max(k for k, bucket in enumerate(self.ranks) if bucket >= enough)
        length = round(self.period * rank / self.ranks[0])
        return level, min(self.period, max(length, self.shortest))

    def _travel(self, level: int) -> int:
        return self.travel[level] if self.travel else 1

    def violations(self, regions: int) -> list[str]:
        problems = common_violations(self, regions, "delay") + overlap_violations(self)
        ranks, period = self.ranks, self.period
        falling = all(map(is_whole, ranks)) and all(a > b for a, b in itertools.pairwise(ranks))
        if not ranks or not falling or ranks[-1] < 1:
            problems.append(f"ranks={ranks}: give falling whole numbers, at least 1")
        counts = [at_least("window", self.window, 1), at_least("shortest", self.shortest, 1)]
        problems += [line for line in counts if line is not None]
        if is_whole(period) and is_whole(self.shortest) and self.shortest > max(1, period):
            problems.append(f"shortest={self.shortest}: must lie in [1, period={period}]")
        if self.probe is not None and at_least("probe", self.probe, 2):
            problems.append(f"probe={self.probe!r}: give 2 or more rounds, or None to never probe")
        return problems
