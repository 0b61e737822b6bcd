"""How a region with several trainers, or growing batches, joins a run that goes on (AdLoCo).

As `rejoin`: the region compiles, takes the newest state of another region, lands the rounds that it
has missed since, and starts from the anchors. The state has all living trainers, with their
requests and policies, and was given at the end of a round. Rounds that are only landed grow batches
and merge trainers as in the other regions, since both follow from what was landed.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
import numpy as np

from lowcomm_jax.adloco.engine import AdaptiveEngine, Goal, Source
from lowcomm_jax.adloco.state import AdaptiveState, Trainer
from lowcomm_jax.recovery.precompile import precompile
from lowcomm_jax.recovery.rejoin import come_in, install, newest
from lowcomm_jax.runtime.errors import Rejected
from lowcomm_jax.runtime.records import Size
from lowcomm_jax.state.leaves import trainer_prefix
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
    # They may be fewer by now, which need programs of their own.
    state = engine.warm(install_trainers(engine, state, arrays, document), source)
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
        trainer = Trainer.of(placed, msgspec.structs.asdict(kept), len(kept.used))
        state = state.with_trainer(number, trainer)
    return state.replace(samples=given.samples)


class _Trainer(msgspec.Struct):
    """Host-side values of a trainer, in the document of a state."""

    batch: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
    request: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
    used: list[Size]
    policy: dict[str, int | float] | None


class _Trainers(msgspec.Struct):
    """Those of all living trainers."""

    samples: Size
    live: dict[Size, _Trainer]


def _trainers(document: dict, state: AdaptiveState) -> _Trainers:
    """What a document says of all trainers, alike what this state has; raises `Rejected`."""
    try:
        found = msgspec.convert(document.get("trainers"), _Trainers, str_keys=True)
    except msgspec.ValidationError as error:
        raise Rejected(f"the document of a state: {error}") from None
    regions, policy = len(state.first.used_R), state.first.policy
    names = None if policy is None else policy.keys()
    for one in found.live.values():
        if len(one.used) != regions:
            raise Rejected(f"samples of {len(one.used)} regions, not of {regions}")
        if (None if one.policy is None else one.policy.keys()) != names:
            raise Rejected("the policy of another method")
        if not all(map(math.isfinite, (one.policy or {}).values())):
            raise Rejected("a policy with numbers that are not finite")
    return found


def _catch_up(
    engine: AdaptiveEngine, state: AdaptiveState, source: Source, least: int
) -> AdaptiveState:
    """Land what the others landed, up to their step; see `rejoin.catch_up`."""
    delivery = engine.delivery

    def forward(state: AdaptiveState) -> AdaptiveState:
        while (step := max(delivery.frontier(), least)) > state.step:
            state = engine.pass_steps(state, source, Goal(step))
        return state

    delivery.exchange.beat(state.step)
    engine.jobs.listen(state, True)
    try:
        return come_in(delivery, forward(state), forward, engine.jobs.passed_over)
    finally:
        engine.jobs.listen(state, False)
