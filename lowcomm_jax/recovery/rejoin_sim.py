"""`rejoin_regions`: what `rejoin` does for a job, where all regions are in one process."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.optimizers import at_step
from lowcomm_jax.params_view import anchors
from lowcomm_jax.state.channel_flights import left_by
from lowcomm_jax.state.train_state import InFlight, TrainState
from lowcomm_jax.sync.round_functions import select
from lowcomm_jax.sync.sync_loop import SyncLoop


def rejoin_regions(
    loop: SyncLoop, state: TrainState, fresh: TrainState, comes_R: np.ndarray
) -> TrainState:
    """Let regions start from the anchor, with the rest of their state as at step 0.

    Only their learning rate is that of the run's step. Their payloads in flight still count, but
    these regions do not adopt them: they started from an anchor, and have made no progress since
    the send. With an anchor per region each takes its own.

    Args:
      state: after the events of a step; is donated.
      fresh: of the same engine at step 0.
      comes_R: bool `[R]`, the regions that come back.
    """
    inner, first = state.inner, fresh.inner
    params = loop.programs.restart_program(inner.params, anchors(state))
    new = (params, first.buffers, first.opt, jnp.zeros_like(inner.tokens))
    old = (inner.params, inner.buffers, inner.opt, inner.tokens)
    params, buffers, opt, tokens = _select_state(comes_R, new, old)
    opt = at_step(opt, int(state.counters.step), comes_R)
    codec, landing = _select_state(
        comes_R, (fresh.codec, fresh.landing), (state.codec, state.landing)
    )
    if state.received:
        for p in range(len(loop.fragments)):
            state = loop.mark_received(state, p, comes_R)
    left = {key: _left_by(flight, comes_R) for key, flight in state.in_flight.items()}
    return state.replace(
        inner=dataclasses.replace(inner, params=params, buffers=buffers, opt=opt, tokens=tokens),
        codec=codec,
        landing=landing,
        in_flight={key: flight for key, flight in left.items() if flight is not None},
        channels=left_by(state.channels, comes_R),
    )


@jax.jit
def _select_state(comes_R, new, old):
    return jax.tree.map(lambda n, o: select(comes_R, n, o), new, old)


def _left_by(flight: InFlight, comes_R: np.ndarray) -> InFlight | None:
    """A payload in flight for which these regions no longer wait; None = no region does."""
    waits = flight.takes_part & ~comes_R
    if flight.anchor_updated and not waits.any():
        return None
    return dataclasses.replace(flight, takes_part=waits)
