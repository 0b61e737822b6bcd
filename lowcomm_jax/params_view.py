"""A training state's parameters in the user's tree structure: global ones, or every region's.

In a program over several processes, all of them call these functions together. Leaves of which a
process holds only a part come to its host as NumPy arrays, one after the other.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from lowcomm_jax.mesh.arrays import to_host_if_hidden
from lowcomm_jax.mesh.offload import unstow
from lowcomm_jax.mesh.regions import ordered_mean
from lowcomm_jax.state.train_state import TrainState

PyTree = Any


class AnyState(Protocol):
    """A `TrainState`, or several trainers' (`AdaptiveEngine`)."""

    def whole(self) -> TrainState:
        """One training state; several trainers are merged."""
        ...

    def refuse_donated(self) -> None:
        """Raises a ValueError where a call has taken the state away."""
        ...


def _whole(state: AnyState) -> TrainState:
    if not hasattr(state, "whole"):
        raise ValueError(
            f"a {type(state).__name__} is no training state: give that of engine.init, step, run "
            "or finish"
        )
    state.refuse_donated()
    return state.whole()


def global_params(state: AnyState) -> PyTree:
    """The model to evaluate and export: the anchor Theta in the user's tree structure.

    With an anchor per region it is their mean. Methods without a main exchange have no anchor; it
    is then the mean of the regions whose values are finite. That mean is unweighted: a state does
    not hold the `weights` of its engine, by which channels and `Engine.finish` average. Several
    trainers are weighted by their requested batches. Trained leaves are fp32.

    Leaves of role `average` (running statistics) are such a mean, too: between two synchronisations
    that of what the regions have gathered since. A job that is one region of several has its own
    alone. Leaves of role `local` come from region 0.

    Raises:
      ValueError: no training state was given, or one that was donated before.
    """
    state = _whole(state)
    anchor = {k: x.mean(axis=0) for k, x in anchors(state).items()}
    buffers = {k: x[0] for k, x in state.inner.buffers.items()}
    named = zip(state.layout.names, state.layout.roles)
    averaged = {k: state.inner.buffers[k] for k, role in named if role == "average"}
    for k, mean in _finite_mean(averaged).items():
        # Where all regions hold one value it is that very one, which a mean may round.
        equal = (averaged[k] == buffers[k]).all(axis=0)
        buffers[k] = jnp.where(equal, buffers[k], mean[0].astype(buffers[k].dtype))
    return to_host_if_hidden(state.layout.tree({**anchor, **buffers, **state.frozen}))


def anchors(state: TrainState) -> dict[str, jax.Array]:
    """The anchors by leaf, fp32 `[A, ...]`.

    Where a method has none (channels alone), the unweighted mean of the regions whose values are
    finite.
    """
    if state.anchor:
        return unstow(state.anchor)
    params, rounding = state.inner.params, state.inner.rounding
    wide = {k: params[k].astype(jnp.float32) + lost for k, lost in rounding.items()}
    return _finite_mean({**params, **wide})


def _finite_mean(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The unweighted mean of leaves `[R, ...]` over the regions that are finite, `[1, ...]`.

    Where none is, that of all.
    """
    if not leaves:
        return {}
    finite = [jnp.isfinite(x).all(axis=tuple(range(1, x.ndim))) for x in leaves.values()]
    finite_R = jnp.stack(finite).all(axis=0)
    counts_R = (finite_R | ~finite_R.any()).astype(jnp.float32)
    return {k: ordered_mean(x, counts_R)[None] for k, x in leaves.items()}


def region_params(state: AnyState) -> PyTree:
    """Every region's own values theta, leaves `[R, ...]`, in the user's tree structure.

    A copy: the state's own arrays are donated to the next step. Several trainers are weighted as
    in `global_params`.

    Raises:
      ValueError: no training state was given, or one that was donated before.
    """
    state = _whole(state)
    count = state.inner.step.shape[0]
    frozen = {k: jax.numpy.broadcast_to(x, (count, *x.shape)) for k, x in state.frozen.items()}
    own = jax.tree.map(jax.numpy.copy, {**state.inner.params, **state.inner.buffers})
    return to_host_if_hidden(state.layout.tree({**own, **frozen}))
