"""Trainers that merge: a function from a list of trainers to a shorter one.

Merged are anchors, the regions' values, floating-point buffers, residuals of error feedback and the
inner optimizer's moments, by compiled programs. The survivor keeps its outer state, its other codec
state (warm starts, keys), its counters and its place in its data stream.
"""

from __future__ import annotations

from typing import Any

import jax

from lowcomm_jax.adloco.state import AdaptiveState, mean, seen
from lowcomm_jax.compression.error_feedback import ErrorFeedbackState
from lowcomm_jax.engine import Engine
from lowcomm_jax.mesh.offload import unstow
from lowcomm_jax.state.train_state import TrainState, with_inner
from lowcomm_jax.sync.round_functions import is_narrow, pseudo_gradient

PyTree = Any


def merge(engine: Engine, state: AdaptiveState, *numbers: int) -> AdaptiveState:
    """The list in which the first of these trainers is the mean of all, and the others are gone.

    The weights are their requests. Compiled once, since these are traced. The states that were
    given stay as they are.
    """
    programs = engine.programs_for(state.first.state.layout)
    trainers = [state.trainers[number] for number in numbers]
    merged = mean((_averaged(t.state), t.request) for t in trainers)
    survivor, kept, inner = trainers[0], trainers[0].state, trainers[0].state.inner
    params, rounding = programs.restart_program(inner.params, merged["params"], inner.rounding, {})
    changes = {"params": params, "rounding": rounding, "buffers": merged["buffers"]}
    own = with_inner(kept, **changes, opt=merged["opt"]).replace(
        anchor=merged["anchor"],
        received=merged["received"],
        codec=jax.tree.map(_with_residual, kept.codec, merged["residuals"], is_leaf=_is_feedback),
    )
    return state.with_trainer(numbers[0], survivor.replace(state=own)).without(*numbers[1:])


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
