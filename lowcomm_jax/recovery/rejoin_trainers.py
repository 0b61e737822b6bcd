"""How a region with several trainers, or growing batches, joins a run that goes on (AdLoCo).

As `rejoin`: the region compiles, takes the newest state of another region, lands the rounds that it
has missed since, and starts from the anchors. The state has all living trainers, with their
requests and policies, and was given at the end of a round. Rounds that are only landed grow batches
and merge trainers as in the other regions, since both follow from what was landed.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from lowcomm_jax.adloco.engine import AdaptiveEngine, Goal, Source
from lowcomm_jax.adloco.state import AdaptiveState, KeptTrainers, Trainer
from lowcomm_jax.recovery.precompile import precompile
from lowcomm_jax.recovery.rejoin import come_in, install, newest
from lowcomm_jax.state.leaves import trainer_prefix
from lowcomm_jax.store.errors import Rejected
from lowcomm_jax.sync.initial_state import codec_states


def enter(engine: AdaptiveEngine, state: AdaptiveState, source: Source) -> AdaptiveState:
    """Join a run that goes on, after `exchange.join`; returns at once at the run's beginning.

    Where the others have ended, and are gone, it takes their result.

    Args:
      state: fresh, or restored from a checkpoint of this region; is donated.
      source: see `AdaptiveEngine.run`; its samples serve to compile.

    Returns:
      the state at the others' step.

    Raises:
      Lost: no region gave a state.
      Rejected: the state that was given, or left at the end, is damaged.
      ValueError: it is of another model or method; lists every difference.
    """
    exchange = engine.delivery.exchange
    if exchange.awaited:
        return state
    least = max(state.step, exchange.sent_before())
    state = engine.warm(state, source)
    [number, *_] = state.trainers
    played = precompile(engine.plain, state.first.state, engine.sync_loop(state))
    state = state.with_trainer(number, state.first.replace(state=played))
    result = exchange.result()
    _, arrays, document = newest(exchange) if result is None else result
    state = install_trainers(engine, state, arrays, document)
    if result is None:
        state = _catch_up(engine, state, source, least)
    return engine.jobs.start_from_anchors(state)


def install_trainers(
    engine: AdaptiveEngine, state: AdaptiveState, arrays: dict[str, np.ndarray], document: dict
) -> AdaptiveState:
    """Replace what regions have in common by another region's; see `rejoin.install`.

    Args:
      arrays, document: as `job_trainers.given` makes them.

    Raises:
      Rejected: the document is damaged.
      ValueError: the state is of another model or method, or has trainers that this one lacks.
    """
    given = _trainers(document, state)
    lacks = given.live.keys() - state.trainers.keys()
    if lacks or not given.live:
        raise ValueError(
            f"another region's state has the trainers {sorted(given.live)}, this one "
            f"{sorted(state.trainers)}: start all regions with the same method"
        )
    for number in state.trainers.keys() - given.live.keys():
        state = state.without(number)
    for number, kept in sorted(given.live.items()):
        own, prefix = state.trainers[number].state, trainer_prefix(number)
        theirs = {k.removeprefix(prefix): x for k, x in arrays.items() if k.startswith(prefix)}
        loop = engine.loop_of(number, own)
        # Residuals of payloads that were counted since must not be sent again.
        fresh = own.replace(codec=codec_states(loop.programs))
        placed = install(loop, fresh, theirs, {"in_flight": []})
        state = state.with_trainer(number, Trainer.of(placed, kept))
    return state.replace(samples=given.samples)


def _trainers(document: dict, state: AdaptiveState) -> KeptTrainers:
    """What a document says of all trainers, alike what this state has; raises `Rejected`."""
    try:
        found = KeptTrainers.of(document.get("trainers"))
    except msgspec.ValidationError as error:
        raise Rejected(f"the document of a state: {error}") from None
    for one in found.live.values():
        if one.policy.keys() != state.first.policy.keys():
            raise Rejected("the policy of another method")
        if not all(map(math.isfinite, one.policy.values())):
            raise Rejected("a policy with numbers that are not finite")
    return found


def _catch_up(
    engine: AdaptiveEngine, state: AdaptiveState, source: Source, least: int
) -> AdaptiveState:
    """Land what the others landed, up to their step; see `rejoin.catch_up`."""
    delivery = engine.delivery

    def forward(state: AdaptiveState, done: bool = False) -> AdaptiveState:
        while (step := max(delivery.exchange.frontier(done), least)) > state.step:
            state = engine.pass_steps(state, source, Goal(step))
        return state

    delivery.exchange.beat(state.step)
    engine.jobs.listen(state, True)
    try:
        return come_in(delivery, forward(state), forward, engine.jobs.passed_over)
    finally:
        engine.jobs.listen(state, False)
