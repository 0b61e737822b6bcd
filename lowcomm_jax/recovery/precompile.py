"""All that happens between inner steps, done once with nobody, so that it is compiled.

A region that comes into a run is as far behind as it takes to compile after it was given a state:
where steps take milliseconds, thousands of them. So it compiles before it asks for one.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.engine import Engine
from lowcomm_jax.runtime.job_loop import JobLoop, job_loop
from lowcomm_jax.state.train_state import TrainState
from lowcomm_jax.sync.initial_state import codec_states

_ROUNDS_AHEAD = 100


def rehearse(engine: Engine, state: TrainState) -> TrainState:
    """Send and land every fragment, with others that send what this region does.

    Done with the very arrays that a newcomer replaces by those of another region
    (`rejoin.install`), since a second set of them might not fit beside the first.

    Args:
      state: is donated; use the returned one.

    Returns:
      the state: of its anchor, outer state and parameters nothing is left that means anything;
      codecs are as at step 0; all else is as it was.
    """
    loop = engine.sync_loop(state)
    alone = _alone(engine, loop)
    landing = jax.tree.map(jnp.copy, state.landing)
    played = state.replace(in_flight={})
    until = played.counters.sends + _rounds(alone, int(played.counters.sends.min()))
    everyone = np.ones(alone.count, bool)
    while (played.counters.sends < until).any():
        played, _ = alone.after(played, alone.next_event(played), everyone)
    params = loop.programs.restart_program(played.inner.params, played.anchor)
    # Where they lay at first, by the very names: XLA may call the same places otherwise, and what
    # an earlier job has compiled and kept would not be found.
    params = {k: jax.device_put(x, state.inner.params[k].sharding) for k, x in params.items()}
    return state.replace(
        inner=dataclasses.replace(state.inner, params=params),
        anchor=played.anchor,
        outer=played.outer,
        codec=codec_states(loop.programs),
        landing=landing,
    )


def _alone(engine: Engine, loop: JobLoop) -> JobLoop:
    """Round loop with the same programs, whose payloads go nowhere."""
    delivery = loop.delivery.rehearsing()
    return job_loop(loop.programs, engine.weights, delivery)


def _rounds(loop: JobLoop, done: int) -> int:
    """How many rounds show all there is: a second send comes behind the first landing, and groups
    of every size must have met."""

    def sizes(rounds: int) -> set[int]:
        drawn = (loop.groups(done + i) for i in range(rounds))
        return {len(loop.delivery.own_group(groups)) for groups in drawn}

    return next(n for n in range(2, _ROUNDS_AHEAD + 1) if sizes(n) == sizes(_ROUNDS_AHEAD))
