"""Before a round: trainers merge if it is time, and what they asked for becomes their batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from lowcomm_jax.adaptive.merging import Merger
from lowcomm_jax.adaptive.state import AdaptiveState, Trainer
from lowcomm_jax.programs import Programs
from lowcomm_jax.trainers import Trainers
from lowcomm_jax.views import global_params

Evaluate = Callable[[Any], float] | None


@dataclasses.dataclass(frozen=True)
class Merge:
    """A merge that was tried before a round.

    Attributes:
      round: 0-based, the round that follows.
      survivor, retired: numbers of the trainers; batches: what each asked for.
      before: loss of each alone; after: of the merged one. None without an evaluation.
      accepted: False when it hurt more than `Trainers.hurt_bound` and was undone.
    """

    round: int
    survivor: int
    retired: int
    batches: tuple[int, int]
    before: tuple[float, float] | None = None
    after: float | None = None
    accepted: bool = True

    @property
    def rise(self) -> float | None:
        """Of the loss over the better one of the two; None without an evaluation."""
        return None if self.after is None else self.after - min(self.before)

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "rise": self.rise}


class Meeting:
    """Merges the trainers of one engine.

    Args:
      trainers: who merges when; period: H, inner steps of a round.
    """

    def __init__(self, trainers: Trainers, period: int):
        self.trainers, self.period = trainers, period
        self._merger = Merger(trainers.moments)

    def warm(self, state: AdaptiveState, programs: Programs) -> None:
        """Compile a merge, if there will be one; nothing is merged."""
        if self.trainers.merge_every is not None and len(state.trainers) > 1:
            self._merged(state, programs, *self.trainers.pair(state.requests))

    def open(
        self, state: AdaptiveState, programs: Programs, evaluate: Evaluate
    ) -> tuple[AdaptiveState, list[Merge]]:
        """Merge if it is time; every trainer's request becomes its batch.

        Returns:
          (state, merges that were tried).
        """
        round_, merges = state.step // self.period, []
        if self.trainers.merges_at(round_, len(state.trainers)):
            state, merge = self._merge(state, programs, round_, evaluate)
            merges.append(merge)
        trainers = {i: t.replace(batch=t.request) for i, t in state.trainers.items()}
        return state.replace(trainers=trainers), merges

    def _merge(self, state, programs, round_: int, evaluate) -> tuple[AdaptiveState, Merge]:
        requests = state.requests
        survivor, retired = self.trainers.pair(requests)
        merged = self._merged(state, programs, survivor, retired)
        merge = Merge(round_, survivor, retired, (requests[survivor], requests[retired]))
        if evaluate is not None:
            pair = [state.trainers[i].state for i in (survivor, retired)]
            before = tuple(float(evaluate(global_params(one))) for one in pair)
            after = float(evaluate(global_params(merged.state)))
            merge = dataclasses.replace(merge, before=before, after=after)
            bound = self.trainers.hurt_bound
            if bound is not None and not merge.rise <= bound:
                return state, dataclasses.replace(merge, accepted=False)
        return _retire(state, survivor, retired, merged), merge

    def all_into_one(self, state: AdaptiveState, programs: Programs) -> AdaptiveState:
        """Merge whoever is left; the result is the mean weighted by all requests."""
        while len(state.trainers) > 1:
            survivor, retired = self.trainers.pair(state.requests)
            weight = state.requests[survivor] + state.requests[retired]
            merged = self._merged(state, programs, survivor, retired)
            state = _retire(state, survivor, retired, merged.replace(request=weight))
        return state

    def _merged(self, state, programs, survivor: int, retired: int) -> Trainer:
        kept, gone = state.trainers[survivor], state.trainers[retired]
        share = gone.request / (kept.request + gone.request)
        return kept.replace(state=self._merger(programs, kept.state, gone.state, share))


def _retire(state: AdaptiveState, survivor: int, retired: int, merged: Trainer) -> AdaptiveState:
    """Put the merged trainer in the survivor's place and let the other one go."""
    gone = state.trainers[retired].state.clock
    trainers = {**state.trainers, survivor: merged}
    del trainers[retired]
    return state.replace(
        trainers=trainers,
        retired_sent=state.retired_sent + gone.bytes_sent,
        retired_received=state.retired_received + gone.bytes_received,
    )
