"""Two trainers become one: the compiled weighted mean of everything that is theirs alone.

Merged are anchors, the regions' values, floating-point buffers, residuals of error feedback and,
if asked for, the inner optimizer's moments. The survivor keeps its outer state, its other codec
state (warm starts, keys), its counters and its place in its data stream.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lowcomm_jax.adaptive.pace import PaceState
from lowcomm_jax.adaptive.state import Trainer
from lowcomm_jax.compression.error_feedback import ErrorFeedbackState
from lowcomm_jax.offload import HOST, fetch
from lowcomm_jax.programs import Programs
from lowcomm_jax.state import TrainState, with_inner

PyTree = Any
# Their counts say where a schedule stands: they go on when moments start anew.
COUNTED = (optax.ScaleByScheduleState, PaceState)


class Merger:
    """Merges states of one engine; everything is compiled once, weights are traced."""

    def __init__(self, moments: str):
        self._moments = moments
        self._fresh: Any = None

    def __call__(
        self, programs: Programs, kept: TrainState, retired: TrainState, share: float
    ) -> TrainState:
        """The survivor after the merge.

        Args:
          kept, retired: stay as they are, so that the merge can be undone.
          share: weight of `retired`, in (0, 1); that of `kept` is the rest.
        """
        mixed = mix(_own(kept), _own(retired), share)
        opt = mixed["opt"] if self._moments == "merge" else self._restarted(programs, kept, mixed)
        state = with_inner(kept, params=mixed["params"], buffers=mixed["buffers"], opt=opt)
        return state.replace(
            anchor=mixed["anchor"],
            received=mixed["received"],
            codec=_with_residuals(kept.codec, mixed["residuals"]),
        )

    def _restarted(self, programs: Programs, kept: TrainState, mixed: dict) -> PyTree:
        if self._fresh is None:
            places = jax.tree.map(lambda x: x.sharding, kept.inner.opt)
            self._fresh = jax.jit(jax.vmap(programs.step.init), out_shardings=places)

        def one(fresh, old):
            return old if isinstance(old, COUNTED) else fresh

        fresh = self._fresh(mixed["params"])
        return jax.tree.map(one, fresh, kept.inner.opt, is_leaf=lambda x: isinstance(x, COUNTED))


def merged(trainers: Sequence[Trainer]) -> TrainState:
    """All trainers as one state to look at, weighted by their requests; it shares arrays with them.

    Merged are anchors, the regions' values and buffers; the rest is the first trainer's.
    """
    first, *others = trainers
    if not others:
        return first.state
    seen, total = _seen(first.state), first.request
    for other in others:
        total += other.request
        seen = mix(seen, _seen(other.state), other.request / total)
    state = with_inner(first.state, params=seen["params"], buffers=seen["buffers"])
    return state.replace(anchor=seen["anchor"])


def _seen(state: TrainState) -> dict[str, PyTree]:
    return {
        "anchor": state.anchor,
        "params": state.inner.params,
        "buffers": state.inner.buffers,
    }


def _own(state: TrainState) -> dict[str, PyTree]:
    return {
        **_seen(state),
        "received": state.received,
        "opt": state.inner.opt,
        "residuals": [found.residual for found in _feedbacks(state.codec)],
    }


def mix(kept: PyTree, retired: PyTree, share: float) -> PyTree:
    """kept + share (retired - kept), fp32 arithmetic; equal leaves stay bit for bit.

    Leaves that are not floating-point numbers are those of `kept`. The result lies where `kept`
    does.
    """
    leaves, treedef = jax.tree.flatten(kept)
    places = tuple(leaf.sharding for leaf in leaves)
    if any(place.memory_kind == HOST for place in places):
        mixed = _mixer(treedef, None)(fetch(kept), fetch(retired), np.float32(share))
        return jax.device_put(mixed, jax.tree.unflatten(treedef, places))
    return _mixer(treedef, places)(kept, retired, np.float32(share))


@functools.cache
def _mixer(treedef, places: tuple | None):
    """`mix`, compiled for results that lie in these places."""
    if places is None:
        return jax.jit(_mixed)
    return jax.jit(_mixed, out_shardings=jax.tree.unflatten(treedef, places))


def _mixed(kept: PyTree, retired: PyTree, share: jax.Array) -> PyTree:
    def one(a, b):
        if not jnp.issubdtype(a.dtype, jnp.floating):
            return a
        wide = a.astype(jnp.float32)
        return (wide + share * (b.astype(jnp.float32) - wide)).astype(a.dtype)

    return jax.tree.map(one, kept, retired)


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
