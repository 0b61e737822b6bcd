"""`precompile`: runs all that happens between inner steps once, without others, to compile it.

A region that joins a run is as far behind as it takes to compile after it was given a state: where
steps take milliseconds, thousands of them. So it compiles before it asks for a state.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.engine import Engine
from lowcomm_jax.runtime.job_loop import JobLoop
from lowcomm_jax.runtime.make_loop import job_loop
from lowcomm_jax.state.train_state import TrainState
from lowcomm_jax.sync.initial_state import codec_states

_ROUNDS_AHEAD = 100


def precompile(engine: Engine, state: TrainState) -> TrainState:
    """Send and land every fragment, with others that send what this region does.

    This uses the very arrays that a newcomer replaces by those of another region
    (`rejoin.install`): a second set might not fit beside the first.

    Args:
      state: is donated; use the returned one.

    Returns:
      the state. Its anchor, outer state and parameters mean nothing; codecs are as at step 0; all
      else is as it was.
    """
    loop = engine.sync_loop(state)
    loopback = _loopback_loop(engine, loop)
    landing = jax.tree.map(jnp.copy, state.landing)
    played = state.replace(in_flight={})
    until = played.counters.sends + _rounds(loopback, int(played.counters.sends.min()))
    everyone = np.ones(loopback.count, bool)
    while (played.counters.sends < until).any():
        played, _ = loopback.after(played, loopback.next_event(played), everyone)
    params = loop.programs.restart_program(played.inner.params, played.anchor)
    # With their first shardings: XLA may name the same placement otherwise, and the programs that
    # an earlier job has compiled and cached would not be found.
    params = {k: jax.device_put(x, state.inner.params[k].sharding) for k, x in params.items()}
    return state.replace(
        inner=dataclasses.replace(state.inner, params=params),
        anchor=played.anchor,
        outer=played.outer,
        codec=codec_states(loop.programs),
        landing=landing,
    )


def _loopback_loop(engine: Engine, loop: JobLoop) -> JobLoop:
    """A loop with the same programs, whose payloads go nowhere."""
    delivery = loop.delivery.loopback()
    return job_loop(loop.programs, engine.weights, delivery)


def _rounds(loop: JobLoop, done: int) -> int:
    """How many rounds compile everything: at least 2, until groups of every size have met."""

    def sizes(rounds: int) -> set[int]:
        drawn = (loop.groups(done + i) for i in range(rounds))
        return {len(loop.delivery.own_group(groups)) for groups in drawn}

    return next(n for n in range(2, _ROUNDS_AHEAD + 1) if sizes(n) == sizes(_ROUNDS_AHEAD))
