"""Trainers that merge: functions from a list of trainers to a shorter one.

Merged are anchors, the regions' values, floating-point buffers, residuals of error feedback and, if
asked for, the inner optimizer's moments, by compiled programs. The survivor keeps its outer state,
its other codec state (warm starts, keys), its counters and its place in its data stream.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from lowcomm_jax.adloco.learning_rate import LrScaleState
from lowcomm_jax.adloco.state import AdaptiveState, mix, seen
from lowcomm_jax.compression.error_feedback import ErrorFeedbackState
from lowcomm_jax.mesh.offload import unstow
from lowcomm_jax.optimizers import is_schedule
from lowcomm_jax.params_view import global_params
from lowcomm_jax.rules.trainers import Moments, Trainers
from lowcomm_jax.state.train_state import TrainState, with_inner
from lowcomm_jax.sync.round_functions import is_narrow, pseudo_gradient
from lowcomm_jax.sync.round_programs import RoundPrograms
from lowcomm_jax.train.inner_step import InnerStep

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
      rise: of the loss over the better one of the two; None without an evaluation.
      accepted: False where the loss rose by more than `Trainers.hurt_bound`, and it was undone.
    """

    round: int
    survivor: int
    retired: int
    batches: tuple[int, int]
    before: tuple[float, float] | None = None
    after: float | None = None
    rise: float | None = None
    accepted: bool = True


def merge_before_round(
    rule: Trainers, programs: RoundPrograms, state: AdaptiveState, round_: int, evaluate: Evaluate
) -> tuple[AdaptiveState, list[TriedMerge]]:
    """Merge two trainers where it is time for it.

    Args:
      evaluate: loss of parameters, for the record and for `hurt_bound`.

    Returns:
      (state, merges that were tried).
    """
    if not rule.merges_at(round_, len(state.trainers)):
        return state, []
    survivor, retired = rule.pair(state.requests)
    merged = merge(rule, programs, state, survivor, retired)
    batches = state.requests[survivor], state.requests[retired]
    tried = TriedMerge(round_, survivor, retired, batches)
    if evaluate is not None:
        each = [state.trainers[survivor], state.trainers[retired], merged.trainers[survivor]]
        *before, after = (float(evaluate(global_params(one.state))) for one in each)
        rise, bound = after - min(before), rule.hurt_bound
        accepted = bound is None or rise <= bound  # not where the loss is no number
        losses = {"before": tuple(before), "after": after, "rise": rise}
        tried = dataclasses.replace(tried, **losses, accepted=accepted)
        if not accepted:
            return state, [tried]
    return merged, [tried]


def merge_all(rule: Trainers, programs: RoundPrograms, state: AdaptiveState) -> AdaptiveState:
    """Merge all trainers into one: the mean, weighted by all requests."""
    while len(state.trainers) > 1:
        survivor, retired = rule.pair(state.requests)
        weight = state.requests[survivor] + state.requests[retired]
        state = merge(rule, programs, state, survivor, retired)
        state = state.with_trainer(survivor, state.trainers[survivor].replace(request=weight))
    return state


def merge(
    rule: Trainers, programs: RoundPrograms, state: AdaptiveState, survivor: int, retired: int
) -> AdaptiveState:
    """The list in which one trainer is the mean of two, by their requests, and the other is gone.

    The states that were given stay as they are, so that the merge can be undone.
    """
    kept, gone = state.trainers[survivor], state.trainers[retired]
    share = gone.request / (kept.request + gone.request)
    mean = merged_state(programs, kept.state, gone.state, share, rule.moments)
    return state.with_trainer(survivor, kept.replace(state=mean)).without(retired)


def merged_state(
    programs: RoundPrograms, kept: TrainState, retired: TrainState, share: float, moments: Moments
) -> TrainState:
    """The weighted mean of two states of one engine; compiled once, weights are traced.

    Args:
      share: weight of `retired`, in (0, 1); that of `kept` is the rest.
    """
    mixed = mix(_own(kept), _own(retired), share)
    inner = kept.inner
    params, rounding = programs.restart_program(inner.params, mixed["params"], inner.rounding, {})
    opt = mixed["opt"]
    if moments == "reset":
        places, treedef = jax.tree.flatten(jax.tree.map(lambda x: x.sharding, inner.opt))
        opt = _with_schedules(_fresh(programs.step, treedef, tuple(places))(params), inner.opt)
    changes = {"params": params, "rounding": rounding, "buffers": mixed["buffers"], "opt": opt}
    return with_inner(kept, **changes).replace(
        anchor=mixed["anchor"],
        received=mixed["received"],
        codec=_with_residuals(kept.codec, mixed["residuals"]),
    )


@functools.lru_cache(maxsize=4)
def _fresh(step: InnerStep, treedef: Any, places: tuple) -> Callable[[PyTree], PyTree]:
    """Makes the inner optimizer's state of step 0, in these places; compiled once."""
    placed = jax.tree.unflatten(treedef, places)
    return jax.jit(jax.vmap(step.init), out_shardings=placed)


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
    """What is averaged; parameters with what rounding took from leaves narrower than fp32."""
    params, base = state.inner.params, state.received or state.anchor
    if narrow := {k: x for k, x in params.items() if is_narrow(x.dtype)}:
        anchor = unstow({k: base[k] for k in narrow})
        params = {**params, **_widened(narrow, anchor, state.inner.rounding)}
    return {
        **seen(state),
        "params": params,
        "received": state.received,
        "opt": state.inner.opt,
        "residuals": [x.residual for x in _feedbacks(state.codec)],
    }


@jax.jit
def _widened(params: PyTree, anchor: PyTree, rounding: PyTree) -> PyTree:
    progress = pseudo_gradient(anchor, params, rounding)
    return {k: anchor[k] - delta for k, delta in progress.items()}


def _is_feedback(x: Any) -> bool:
    return isinstance(x, ErrorFeedbackState)


def _feedbacks(codec: PyTree) -> list[ErrorFeedbackState]:
    return [x for x in jax.tree.leaves(codec, is_leaf=_is_feedback) if _is_feedback(x)]


def _with_residuals(codec: PyTree, residuals: list[PyTree]) -> PyTree:
    left = iter(residuals)

    def one(x):
        return x._replace(residual=next(left)) if _is_feedback(x) else x

    return jax.tree.map(one, codec, is_leaf=_is_feedback)
