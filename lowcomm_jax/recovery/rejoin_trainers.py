"""How a region with several trainers, or growing batches, joins a run that goes on (AdLoCo).

As `rejoin`: the region compiles, takes the newest state of another region, lands the rounds that it
has missed since, and starts from the anchors. The state has all living trainers, with their
requests and policies, and was given at the end of a round. Rounds that are only landed grow batches
and merge trainers as in the other regions, since both follow from what was landed.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from lowcomm_jax.adaptive.checks import Goal
from lowcomm_jax.adaptive.engine import AdaptiveEngine, Source
from lowcomm_jax.adaptive.state import AdaptiveState, Trainer
from lowcomm_jax.recovery.precompile import precompile
from lowcomm_jax.recovery.rejoin import install, newest
from lowcomm_jax.runtime import records
from lowcomm_jax.runtime.errors import Rejected
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
    played = precompile(engine.engine, state.first.state, engine.sync_loop(state))
    state = state.with_trainer(number, state.first.replace(state=played))
    result = exchange.result()
    _, arrays, document = newest(exchange) if result is None else result
    # They may be fewer by now, which need programs of their own.
    state = engine.warm(install_trainers(engine, state, arrays, document), source)
    if result is not None:
        return engine.start_from_anchors(state)
    return _catch_up(engine, state, source, least)


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
    given = records.picked(document.get("trainers"), samples=records.size, live=_live(state))
    lacks = given["live"].keys() - state.trainers.keys()
    if lacks or not given["live"]:
        raise ValueError(
            f"another region's state has the trainers {sorted(given['live'])}, this one "
            f"{sorted(state.trainers)}: start all regions with the same method"
        )
    trainers, gone = {}, dict(state.trainers)
    for number, kept in sorted(given["live"].items()):
        trainer, prefix = gone.pop(number), trainer_prefix(number)
        own = {k.removeprefix(prefix): x for k, x in arrays.items() if k.startswith(prefix)}
        loop = engine.loop_of(number, trainer.state)
        # Residuals of payloads that were counted since must not be sent again.
        fresh = trainer.state.replace(codec=codec_states(loop.programs))
        trainers[number] = Trainer(
            state=install(loop, fresh, own, {"in_flight": []}),
            batch=kept["batch"],
            request=kept["request"],
            used_R=np.array(kept["used"], np.int64),
            policy=kept["policy"],
        )
    counters = [trainer.state.counters for trainer in gone.values()]
    return dataclasses.replace(
        state,
        trainers=trainers,
        samples=given["samples"],
        retired_sent=sum((c.bytes_sent for c in counters), state.retired_sent),
        retired_received=sum((c.bytes_received for c in counters), state.retired_received),
    )


def _live(state: AdaptiveState) -> records.Read[dict[int, Any]]:
    """A reader of all trainers' host-side values, alike those of this state."""
    regions, like = len(state.first.used_R), state.first.policy

    def policy(value: Any) -> Any:
        if type(value) is not type(like) or (like is not None and value.keys() != like.keys()):
            raise Rejected("the policy of another method")
        return value if value is None else records.by_name(_number)(value)

    def used(value: Any) -> list[int]:
        found = records.listed(records.size)(value)
        if len(found) != regions:
            raise Rejected(f"samples of {len(found)} regions, not of {regions}")
        return found

    def one(value: Any) -> Any:
        reads = {"batch": _from_1, "request": _from_1, "used": used, "policy": policy}
        return records.picked(value, **reads)

    return records.by_region(one)


def _from_1(value: Any) -> int:
    if records.size(value) < 1:
        raise Rejected("no batch")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise Rejected("no finite number")
    return value


def _catch_up(
    engine: AdaptiveEngine, state: AdaptiveState, source: Source, least: int
) -> AdaptiveState:
    """Land what the others landed, up to their step, and start there; see `rejoin.catch_up`."""
    delivery = engine.delivery
    delivery.exchange.beat(state.step)
    engine.listen(state, True)
    try:
        state = _to_the_front(engine, state, source, least)
        delivery.exchange.come_in()
        over = True  # once more: the others may have been in an exchange when they read that
        while over or delivery.frontier() > state.step:
            state = _to_the_front(engine, state, source, least)
            over = engine.passed_over(state)
            delivery.exchange.wait_for_beats()
    finally:
        engine.listen(state, False)
    return engine.start_from_anchors(state)


def _to_the_front(
    engine: AdaptiveEngine, state: AdaptiveState, source: Source, least: int
) -> AdaptiveState:
    while (left := max(engine.delivery.frontier(), least) - state.step) > 0:
        state = engine.pass_steps(state, source, Goal(state.step + left, math.inf))
    return state
