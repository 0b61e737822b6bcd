"""Trainers that merge: functions from a list of trainers to a shorter one.

Merged are anchors, the regions' values, floating-point buffers, residuals of error feedback and the
inner optimizer's moments, by compiled programs. The survivor keeps its outer state, its other codec
state (warm starts, keys), its counters and its place in its data stream.
"""

from __future__ import annotations

from typing import Any

import jax

from lowcomm_jax.adloco.state import AdaptiveState, mix, seen
from lowcomm_jax.compression.error_feedback import ErrorFeedbackState
from lowcomm_jax.mesh.offload import unstow
from lowcomm_jax.rules.trainers import Trainers
from lowcomm_jax.state.train_state import TrainState, with_inner
from lowcomm_jax.sync.round_functions import is_narrow, pseudo_gradient
from lowcomm_jax.sync.round_programs import RoundPrograms

PyTree = Any


def merge_all(rule: Trainers, programs: RoundPrograms, state: AdaptiveState) -> AdaptiveState:
    """Merge all trainers into one: the mean, weighted by all requests."""
    while len(state.trainers) > 1:
        survivor, retired = rule.pair(state.requests)
        weight = state.requests[survivor] + state.requests[retired]
        state = merge(programs, state, survivor, retired)
        state = state.with_trainer(survivor, state.trainers[survivor].replace(request=weight))
    return state


def merge(
    programs: RoundPrograms, state: AdaptiveState, survivor: int, retired: int
) -> AdaptiveState:
    """The list in which one trainer is the mean of two, by their requests, and the other is gone.

    Compiled once, since the weights are traced. The states that were given stay as they are.
    """
    trainer, gone = state.trainers[survivor], state.trainers[retired]
    kept, share = trainer.state, gone.request / (trainer.request + gone.request)
    mixed, inner = mix(_averaged(kept), _averaged(gone.state), share), kept.inner
    params, rounding = programs.restart_program(inner.params, mixed["params"], inner.rounding, {})
    changes = {"params": params, "rounding": rounding, "buffers": mixed["buffers"]}
    mean = with_inner(kept, **changes, opt=mixed["opt"]).replace(
        anchor=mixed["anchor"],
        received=mixed["received"],
        codec=jax.tree.map(_with_residual, kept.codec, mixed["residuals"], is_leaf=_is_feedback),
    )
    return state.with_trainer(survivor, trainer.replace(state=mean)).without(retired)


def _averaged(state: TrainState) -> dict[str, PyTree]:
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
        "residuals": jax.tree.map(_residual, state.codec, is_leaf=_is_feedback),
    }


@jax.jit
def _widened(params: PyTree, anchor: PyTree, rounding: PyTree) -> PyTree:
    progress = pseudo_gradient(anchor, params, rounding)
    return {k: anchor[k] - delta for k, delta in progress.items()}


def _is_feedback(x: Any) -> bool:
    return isinstance(x, ErrorFeedbackState)


def _residual(codec: Any) -> PyTree:
    return codec.residual if _is_feedback(codec) else None


def _with_residual(codec: Any, residual: PyTree) -> Any:
    return codec._replace(residual=residual) if _is_feedback(codec) else codec
