"""CoCoDC's adaptive transmission (arXiv 2504.17672): send the fragment that changes most.

Every h = floor(H / N) steps (at a slot) one fragment may leave. Of the fragments not in flight that
is an overdue one: H steps or more since its last send. If there is none it is one never sent, else
the one of the largest score. Ties go to the fragment sent longest ago. The score is

- `rate`: ||mean Delta_p||_2 / sqrt(numel_p) / I_p, as of the fragment's last landing, with I_p the
  steps between its last two sends (the paper's form); or
- `drift`: mean over regions of ||Theta_p - theta_p||_1 / (age_p numel_p), as of the last payload
  that landed, with age_p the steps since the fragment's last send (the authors' later code). K
  numbers travel in every payload's header.

Differs from the paper:

- The rate is normalised by sqrt(numel), else the embedding always wins.
- The drift comes with the payloads, instead of an all-reduce of its own before every choice.
- A fragment in flight is never sent again (the authors' code would overwrite its snapshot).
- Of several overdue fragments the one sent longest ago leaves first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from lowcomm_jax.refused import is_whole
from lowcomm_jax.schedule.base import Remembering, Send, common_violations
from lowcomm_jax.schedule.timing import syncs_per_period
from lowcomm_jax.settings import SWITCH
from lowcomm_jax.state.train_state import Decided, SyncCounters


@dataclasses.dataclass(frozen=True)
class Adaptive(Remembering):
    """CoCoDC's choice, at most one fragment a slot. See `Schedule` for the other fields.

    Attributes:
      syncs: N, slots per period; with `measured` those of the first periods. None = as many as the
        network allows.
      statistic: the score, `rate` or `drift`.
      gamma: share of the link that may be used, in (0, 1]; read where `syncs` is None or N is
        `measured`.
      measured: the run measures T_c and T_s, which travel with every payload. N changes at the
        period boundary after their landing.
    """

    period: int
    fragments: int
    syncs: int | None = dataclasses.field()  # without a default
    delay: int | tuple[int, ...] = 0
    statistic: Literal["rate", "drift"] = "rate"
    gamma: float | None = None
    measured: bool = False

    @property
    def spacing(self) -> int:
        """h: inner steps between two slots; with `measured` those of the first periods."""
        return self._spacing(self.syncs)

    def _spacing(self, syncs: int) -> int:
        return max(1, self.period // int(syncs))

    def start(self) -> Decided:
        if not self.measured:
            return {}
        # Two grids of slots: the one of now, and the one that begins behind step `since[1]`.
        return {"since": np.zeros(2, np.int64), "syncs": np.full(2, self.syncs, np.int64)}

    def _grid(self, step: int, counters: SyncCounters) -> tuple[int, int]:
        """(origin, spacing h) of the slots that govern a step."""
        if not self.measured:
            return 0, self.spacing
        since, syncs = counters.decided["since"], counters.decided["syncs"]
        now = int(step > since[1])
        return int(since[now]), self._spacing(syncs[now])

    def due(self, step: int, counters: SyncCounters) -> tuple[Send, ...]:
        """In a slot every fragment: those overdue, those never sent, then those that are rated."""
        origin, spacing = self._grid(step, counters)
        if (step - origin) % spacing:
            return ()
        sent = counters.last_sent
        oldest_first = sorted(range(self.fragments), key=lambda p: (sent[p], p))
        new = [p for p in oldest_first if sent[p] < 0]
        overdue = [p for p in oldest_first if sent[p] >= 0 and step - sent[p] >= self.period]
        rated = tuple(p for p in oldest_first if sent[p] >= 0 and step - sent[p] < self.period)
        return (Send((*overdue, *new, *rated), rated=rated),)

    def decide(self, step: int, counters: SyncCounters, landings: Sequence[Any]) -> Decided | None:
        seconds = [e.values["seconds"] for e in landings if "seconds" in e.values]
        seconds = [pair for pair in seconds if np.isfinite(pair).all()]
        if not seconds:
            return None
        step_seconds, sync_seconds = (float(x) for x in seconds[-1])
        syncs = syncs_per_period(
            self.period, self.fragments, self.gamma, step_seconds, sync_seconds
        )
        now = counters.decided
        # From the very boundary on: what lands there must not undo the change that begins there.
        current = int(step >= now["since"][1])
        boundary = (step // self.period + 1) * self.period
        return {
            "since": np.array([now["since"][current], boundary], np.int64),
            "syncs": np.array([now["syncs"][current], syncs], np.int64),
        }

    def violations(self, regions: int) -> list[str]:
        problems = common_violations(self, regions, "overlap")
        limits = is_whole(self.fragments) and is_whole(self.period)
        if self.syncs is not None and not is_whole(self.syncs):
            problems.append(f"syncs_per_period={self.syncs!r}: give a whole number")
        elif limits and self.syncs is not None and not self.fragments <= self.syncs <= self.period:
            problems.append(
                f"syncs_per_period={self.syncs}: must lie between fragments={self.fragments} (or a "
                f"fragment could starve) and period={self.period} (at most one a step)"
            )
        problems += filter(None, [SWITCH.problem("measured", self.measured)])
        if self.statistic not in ("rate", "drift"):
            problems.append(f"score={self.statistic!r}: use rate or drift")
        return problems
