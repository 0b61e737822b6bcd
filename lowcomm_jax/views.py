"""A training state as models in the user's tree structure."""

from __future__ import annotations

from typing import Any

import jax

from lowcomm_jax.adaptive.merging import merged
from lowcomm_jax.adaptive.state import AdaptiveState
from lowcomm_jax.offload import fetch
from lowcomm_jax.state import TrainState

PyTree = Any


def whole(state: TrainState | AdaptiveState) -> TrainState:
    """One training state to look at: of several trainers their weighted mean."""
    if isinstance(state, AdaptiveState):
        return merged(list(state.trainers.values()))
    return state


def global_params(state: TrainState | AdaptiveState) -> PyTree:
    """The anchor Theta in the user's tree structure (mean over anchors if there are several).

    This is what you would ship and evaluate; fp32 for trained leaves. Non-trainable leaves come
    from region 0. Several trainers are weighted by the batches they ask for.
    """
    state = whole(state)
    anchor = {k: x.mean(axis=0) for k, x in fetch(state.anchor).items()}
    buffers = {k: x[0] for k, x in state.inner.buffers.items()}
    return state.layout.tree({**anchor, **buffers, **state.frozen})


def region_params(state: TrainState | AdaptiveState) -> PyTree:
    """Every region's own values theta, leaves `[R, ...]`, in the user's tree structure.

    A copy: the state's own arrays are donated to the next step. Several trainers are weighted as
    in `global_params`.
    """
    state = whole(state)
    count = state.inner.step.shape[0]
    frozen = {k: jax.numpy.broadcast_to(x, (count, *x.shape)) for k, x in state.frozen.items()}
    own = jax.tree.map(jax.numpy.copy, {**state.inner.params, **state.inner.buffers})
    return state.layout.tree({**own, **frozen})
