"""A lost region comes back where all regions are in one process, as `jobs.rejoin` lets a job."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.optimizers import at_step
from lowcomm_jax.state.train_state import InFlight, TrainState
from lowcomm_jax.sync.round_functions import select
from lowcomm_jax.sync.sync_loop import SyncLoop


def come_back(
    loop: SyncLoop, state: TrainState, fresh: TrainState, comes_R: np.ndarray
) -> TrainState:
    """Let regions start from the anchor: all else is as at step 0, but for the learning rate.

    What they had sent and is under way still counts, but they do not land it: they started from an
    anchor, and have made no progress since its send. With an anchor per region it is their own one.

    Args:
      state: after the events of a step; is donated.
      fresh: of the same engine at step 0.
      comes_R: bool `[R]`.
    """
    inner, first = state.inner, fresh.inner
    params = loop.programs.restart_program(inner.params, state.anchor)
    new = (params, first.buffers, first.opt, jnp.zeros_like(inner.tokens))
    old = (inner.params, inner.buffers, inner.opt, inner.tokens)
    params, buffers, opt, tokens = _chosen(comes_R, new, old)
    opt = at_step(opt, int(state.counters.step), comes_R)
    codec, landing = _chosen(comes_R, (fresh.codec, fresh.landing), (state.codec, state.landing))
    received = {}
    if state.received:
        received = loop.programs.received_program(state.received, state.anchor, comes_R)
    left = {key: _left_by(flight, comes_R) for key, flight in state.in_flight.items()}
    return state.replace(
        inner=dataclasses.replace(inner, params=params, buffers=buffers, opt=opt, tokens=tokens),
        codec=codec,
        landing=landing,
        received=received,
        in_flight={key: flight for key, flight in left.items() if flight is not None},
    )


@jax.jit
def _chosen(comes_R, new, old):
    return jax.tree.map(lambda n, o: select(comes_R, n, o), new, old)


def _left_by(flight: InFlight, comes_R: np.ndarray) -> InFlight | None:
    """A payload in flight that these regions wait for no longer; None = nobody does."""
    waits = flight.takes_part & ~comes_R
    if flight.anchor_updated and not waits.any():
        return None
    return dataclasses.replace(flight, takes_part=waits)
