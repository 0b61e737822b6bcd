"""`precompile`: runs all sends and landings once, without other regions, to compile them.

A region that compiles after it was given a state falls behind meanwhile: by thousands of steps
where a step takes milliseconds. So it compiles before it asks for a state.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.engine import Engine
from lowcomm_jax.jobs.job_carrier import JobCarrier
from lowcomm_jax.state.train_state import TrainState
from lowcomm_jax.sync.initial_state import codec_states
from lowcomm_jax.sync.sync_loop import SyncLoop

_ROUNDS_AHEAD = 100


def precompile(engine: Engine, state: TrainState) -> TrainState:
    """Send and land every fragment, with this region's own payloads as those of the others.

    It uses the arrays that a newcomer later replaces by those of another region
    (`rejoin.install`), since a second set might not fit beside the first.

    Args:
      state: is donated; use the returned one.

    Returns:
      The state. Its anchor, as here and as received, outer state and parameters have no meaning;
      codecs are as at step 0; the rest is unchanged.
    """
    called = engine.sync_loop(state)
    assert called.separate  # others have nothing to send to
    programs = called.programs
    loopback = type(called)(programs, engine.weights, called.carrier.alone())
    landing = jax.tree.map(jnp.copy, state.landing)
    played = state.replace(in_flight={}, counters=state.counters.copy())
    if called.by_rounds:  # reports that have not landed are of no round here
        for flight in state.in_flight.values():
            played.counters.sends[flight.fragment] -= 1
    done = played.counters.sends
    until = done + _rounds(loopback, engine.carrier, int(done.min()))
    everyone = np.ones(loopback.count, bool)
    while (played.counters.sends < until).any():
        played, _ = loopback.after(played, loopback.next_event(played), everyone)
    inner = played.inner
    taken = programs.restart_program(inner.params, played.anchor, inner.rounding, {})
    # With their first shardings: XLA may name the same placement otherwise, and the programs that
    # an earlier job has compiled and cached would not be found.
    first = state.inner.params, state.inner.rounding
    params, rounding = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), taken, first)
    return state.replace(
        inner=dataclasses.replace(state.inner, params=params, rounding=rounding),
        anchor=played.anchor,
        received=played.received,
        outer=played.outer,
        merge=played.merge,
        codec=codec_states(programs),
        landing=landing,
    )


def _rounds(loop: SyncLoop, carrier: JobCarrier, done: int) -> int:
    """Number of rounds that compile everything: at least 2, until groups of every size occurred."""

    def sizes(rounds: int) -> set[int]:
        drawn = (loop.groups(done + i) for i in range(rounds))
        return {len(carrier.own_group(groups)) for groups in drawn}

    return next(n for n in range(2, _ROUNDS_AHEAD + 1) if sizes(n) == sizes(_ROUNDS_AHEAD))
