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
from lowcomm_jax.gossip_trips import round_trips
from lowcomm_jax.initial import codec_states
from lowcomm_jax.roundtrip import RoundTrips
from lowcomm_jax.state import TrainState

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
    trips = engine.trips(state)
    alone = _alone(engine, trips)
    landing = jax.tree.map(jnp.copy, state.landing)
    played = state.replace(in_flight={})
    until = played.clock.sends + _rounds(alone, int(played.clock.sends.min()))
    everyone = np.ones(alone.count, bool)
    while (played.clock.sends < until).any():
        played, _ = alone.after(played, alone.next_event(played), everyone)
    params = trips.programs.restart(played.inner.params, played.anchor)
    # Where they lay at first, by the very names: XLA may call the same places otherwise, and what
    # an earlier job has compiled and kept would not be found.
    params = {k: jax.device_put(x, state.inner.params[k].sharding) for k, x in params.items()}
    return state.replace(
        inner=dataclasses.replace(state.inner, params=params),
        anchor=played.anchor,
        outer=played.outer,
        codec=codec_states(trips.programs),
        landing=landing,
    )


def _alone(engine: Engine, trips: RoundTrips) -> RoundTrips:
    """Round trips with the same programs, whose payloads go nowhere."""
    carrier = trips.carrier.rehearsing()
    recipe = dataclasses.replace(trips.programs.recipe, carrier=carrier)
    return round_trips(dataclasses.replace(trips.programs, recipe=recipe), engine.weights)


def _rounds(trips: RoundTrips, done: int) -> int:
    """How many rounds show all there is: a second send comes behind the first landing, and groups
    of every size must have met."""

    def sizes(rounds: int) -> set[int]:
        drawn = (trips.groups(done + i) for i in range(rounds))
        return {len(trips.carrier.own_group(groups)) for groups in drawn}

    return next(n for n in range(2, _ROUNDS_AHEAD + 1) if sizes(n) == sizes(_ROUNDS_AHEAD))
