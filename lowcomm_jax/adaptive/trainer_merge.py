"""Trainers that merge: when, which two, and the weighted mean that the survivor becomes.

`TrainerMerge` acts before a round. Two trainers merge if the round is due for it, and every
trainer's request becomes its batch. `StateMerge` computes the merged state with compiled programs.

Merged are anchors, the regions' values, floating-point buffers, residuals of error feedback and, if
asked for, the inner optimizer's moments. The survivor keeps its outer state, its other codec state
(warm starts, keys), its counters and its place in its data stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from lowcomm_jax.adaptive.lr_scaling import LrScaleState
from lowcomm_jax.adaptive.state import AdaptiveState, Trainer, mix, seen
from lowcomm_jax.batching.trainers import Trainers
from lowcomm_jax.compression.error_feedback import ErrorFeedbackState
from lowcomm_jax.mesh.offload import unstow
from lowcomm_jax.optimizers import is_schedule
from lowcomm_jax.params_view import global_params
from lowcomm_jax.state.train_state import TrainState, with_inner
from lowcomm_jax.sync.round_functions import is_narrow, pseudo_gradient
from lowcomm_jax.sync.round_programs import RoundPrograms

PyTree = Any
Evaluate = Callable[[Any], float] | None


@dataclasses.dataclass(frozen=True)
class TriedMerge:
    """A merge that was tried before a round.

    Attributes:
      round: 0-based, the round that follows.
      survivor, retired: numbers of the trainers.
      batches: requested batch of each.
      before: loss of each alone; None without an evaluation.
      after: loss of the merged one; None without an evaluation.
      accepted: False where the loss rose by more than `Trainers.hurt_bound`, and it was undone.
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


class TrainerMerge:
    """Merges the trainers of one engine.

    Args:
      trainers: which trainers merge, and when.
      period: H, inner steps of a round.
    """

    def __init__(self, trainers: Trainers, period: int):
        self.trainers, self.period = trainers, period
        self._merge_states = StateMerge(trainers.moments)

    def warm(self, state: AdaptiveState, programs: RoundPrograms) -> None:
        """Compile a merge, if there will be one; nothing is merged."""
        if self.trainers.merge_every is not None and len(state.trainers) > 1:
            self._merged(state, programs, *self.trainers.pair(state.requests))

    def before_round(
        self, state: AdaptiveState, programs: RoundPrograms, evaluate: Evaluate
    ) -> tuple[AdaptiveState, list[TriedMerge]]:
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

    def _merge(self, state, programs, round_: int, evaluate) -> tuple[AdaptiveState, TriedMerge]:
        requests = state.requests
        survivor, retired = self.trainers.pair(requests)
        merged = self._merged(state, programs, survivor, retired)
        merge = TriedMerge(round_, survivor, retired, (requests[survivor], requests[retired]))
        if evaluate is not None:
            pair = [state.trainers[i].state for i in (survivor, retired)]
            before = tuple(float(evaluate(global_params(one))) for one in pair)
            after = float(evaluate(global_params(merged.state)))
            merge = dataclasses.replace(merge, before=before, after=after)
            bound = self.trainers.hurt_bound
            if bound is not None and not merge.rise <= bound:
                return state, dataclasses.replace(merge, accepted=False)
        return _retire(state, survivor, retired, merged), merge

    def all_into_one(self, state: AdaptiveState, programs: RoundPrograms) -> AdaptiveState:
        """Merge all trainers into one: the mean, weighted by all requests."""
        while len(state.trainers) > 1:
            survivor, retired = self.trainers.pair(state.requests)
            weight = state.requests[survivor] + state.requests[retired]
            merged = self._merged(state, programs, survivor, retired)
            state = _retire(state, survivor, retired, merged.replace(request=weight))
        return state

    def _merged(self, state, programs, survivor: int, retired: int) -> Trainer:
        kept, gone = state.trainers[survivor], state.trainers[retired]
        share = gone.request / (kept.request + gone.request)
        return kept.replace(state=self._merge_states(programs, kept.state, gone.state, share))


def _retire(state: AdaptiveState, survivor: int, retired: int, merged: Trainer) -> AdaptiveState:
    """Put the merged trainer in the survivor's place and let the other one go."""
    gone = state.trainers[retired].state.counters
    trainers = {**state.trainers, survivor: merged}
    del trainers[retired]
    return state.replace(
        trainers=trainers,
        retired_sent=state.retired_sent + gone.bytes_sent,
        retired_received=state.retired_received + gone.bytes_received,
    )


# -- the merged state --------------------------------------------------------------------------


class StateMerge:
    """The weighted mean of two states of one engine; compiled once, weights are traced."""

    def __init__(self, moments: str):
        self._moments = moments
        self._fresh: Any = None

    def __call__(
        self, programs: RoundPrograms, kept: TrainState, retired: TrainState, share: float
    ) -> TrainState:
        """The survivor after the merge.

        Args:
          kept, retired: stay as they are, so that the merge can be undone.
          share: weight of `retired`, in (0, 1); that of `kept` is the rest.
        """
        mixed = mix(_own(kept), _own(retired), share)
        params, rounding = programs.restart_program(
            kept.inner.params, mixed["params"], kept.inner.rounding, {}
        )
        merges = self._moments == "merge"
        opt = mixed["opt"] if merges else self._restarted(programs, kept, params)
        changes = {"params": params, "rounding": rounding, "buffers": mixed["buffers"], "opt": opt}
        state = with_inner(kept, **changes)
        return state.replace(
            anchor=mixed["anchor"],
            received=mixed["received"],
            codec=_with_residuals(kept.codec, mixed["residuals"]),
        )

    def _restarted(self, programs: RoundPrograms, kept: TrainState, params: PyTree) -> PyTree:
        if self._fresh is None:
            places = jax.tree.map(lambda x: x.sharding, kept.inner.opt)
            self._fresh = jax.jit(jax.vmap(programs.step.init), out_shardings=places)
        return _with_schedules(self._fresh(params), kept.inner.opt)


def _with_schedules(fresh: PyTree, old: PyTree) -> PyTree:
    """The state of an inner optimizer that starts anew, with schedules where they were.

    Injected hyperparameters are kept with their schedules; the state inside them starts anew.
    """

    def counted(x: Any) -> bool:
        return isinstance(x, LrScaleState) or is_schedule(x)

    def one(fresh: Any, old: Any) -> Any:
        if not counted(old):
            return fresh
        if "inner_state" not in old._fields:
            return old
        return old._replace(inner_state=_with_schedules(fresh.inner_state, old.inner_state))

    return jax.tree.map(one, fresh, old, is_leaf=counted)


def _own(state: TrainState) -> dict[str, PyTree]:
    return {
        **seen(state),
        "params": _wide(state),
        "received": state.received,
        "opt": state.inner.opt,
        "residuals": [found.residual for found in _feedbacks(state.codec)],
    }


def _wide(state: TrainState) -> dict[str, jax.Array]:
    """The regions' parameters, with what rounding took from leaves narrower than fp32."""
    params, base = state.inner.params, state.received or state.anchor
    narrow = {k: x for k, x in params.items() if is_narrow(x.dtype)}
    if not narrow:
        return params
    anchor = unstow({k: base[k] for k in narrow})
    return {**params, **_widened(narrow, anchor, state.inner.rounding)}


@jax.jit
def _widened(params: PyTree, anchor: PyTree, rounding: PyTree) -> PyTree:
    progress = pseudo_gradient(anchor, params, rounding)
    return {k: anchor[k] - delta for k, delta in progress.items()}


def _is_feedback(x: Any) -> bool:
    return isinstance(x, ErrorFeedbackState)


def _feedbacks(codec: PyTree) -> list[ErrorFeedbackState]:
    found = jax.tree.leaves(codec, is_leaf=_is_feedback)
    return [x for x in found if _is_feedback(x)]


def _with_residuals(codec: PyTree, residuals: list[PyTree]) -> PyTree:
    left = iter(residuals)

    def one(x):
        return x._replace(residual=next(left)) if _is_feedback(x) else x

    return jax.tree.map(one, codec, is_leaf=_is_feedback)
