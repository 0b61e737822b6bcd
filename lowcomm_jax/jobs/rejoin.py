"""A region that comes into a run that goes on: it compiles, takes the newest state of another one,
lands what it has missed since, and only then makes steps of its own.

The regions that train do not wait for it meanwhile. What a lost region had not sent is lost; it
starts from the anchor, with codecs as at step 0 (residuals of 0) and the inner optimizer state it
comes with: that of its checkpoint, or a fresh one.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import numpy as np

from lowcomm_jax.checkpoint.leaves import named_leaves
from lowcomm_jax.checkpoint.target import abstract_flight
from lowcomm_jax.engine import Engine
from lowcomm_jax.exchange import JobExchange
from lowcomm_jax.exchange.between.states import State
from lowcomm_jax.inner_count import at_step
from lowcomm_jax.jobs.company import Company
from lowcomm_jax.jobs.rehearsal import rehearse
from lowcomm_jax.jobs.restart import expect, reconnect
from lowcomm_jax.jobs.shared import SHARED, moment
from lowcomm_jax.processes import place, team
from lowcomm_jax.roundtrip import RoundTrips
from lowcomm_jax.state import TrainState, with_inner

PyTree = Any
_POLL_SECONDS = 0.05
_HEARD_SECONDS = 10.0  # who trains tells at its next landing, perhaps just after the donor's


def enter(engine: Engine, state: TrainState, batch: PyTree) -> TrainState:
    """Come into a run that goes on, after `exchange.join`; nothing to do at its beginning.

    Args:
      state: fresh, or restored from a checkpoint of this region; is donated.
      batch: a host batch like those of `Engine.run`, to compile the inner steps with; nothing is
        learnt from it.

    Returns:
      the state at the others' step.

    Raises:
      Lost: nobody gave a state.
      Parted: the one that was given is not what the others have.
    """
    exchange, trips = engine.recipe.carrier.exchange, engine.trips(state)
    if exchange.awaited:
        return state
    own = int(state.clock.step)
    state = engine.warm(rehearse(engine, state), batch)
    rehearsed = {_level(trips, state)}
    while True:
        _, arrays, document = _newest(exchange)
        trips.carrier.moments.forget()
        state = install(trips, state, arrays, document)
        _compare(trips, state)
        if _level(trips, state) in rehearsed:
            return catch_up(engine, state, own)
        # The run has come to another level of its codec, whose programs are others.
        state = rehearse(engine, state)
        rehearsed.add(_level(trips, state))


def _level(trips: RoundTrips, state: TrainState) -> int:
    return trips.schedule.level(state.clock)


def _newest(exchange: JobExchange) -> State:
    exchange.want_state()
    company = Company(exchange)
    given = "one gave its state"
    return team().told("state", lambda: company.wait(given, exchange.newest_state))


def _compare(trips: RoundTrips, state: TrainState) -> None:
    """Insist that the anchors are those that the regions which train have had at that moment.

    Raises:
      Parted: they are not, or not those that hold.
    """
    exchange, until = trips.carrier.exchange, time.monotonic() + _HEARD_SECONDS
    own, (step, name) = trips.carrier.moments.terms(state.anchor, trips.fragments), moment(state)
    if not own:
        return  # regions have anchors of their own
    company = Company(exchange)

    def heard() -> bool | None:
        return exchange.agrees(step, name, own, at_last=time.monotonic() > until) or None

    team().told("agrees", lambda: company.wait("they told of their anchors", heard))


def serve(engine: Engine, state: TrainState, linger_s: float = 30.0) -> None:
    """After the end: give the state to regions that are just coming in, which have no one else."""
    carrier, until = engine.recipe.carrier, time.monotonic() + linger_s
    while team().told(
        "serve", lambda: bool(carrier.exchange.asking()) and time.monotonic() < until
    ):
        carrier.answer(state)
        time.sleep(_POLL_SECONDS)


def install(
    trips: RoundTrips, state: TrainState, arrays: dict[str, np.ndarray], document: dict
) -> TrainState:
    """Replace what regions have in common by another region's; `state` comes from `rehearse`.

    Raises:
      ValueError: the arrays are of another model or method, with every difference.
    """
    like = {
        name: x
        for field in SHARED
        for name, x in named_leaves(field, getattr(state, field)).items()
    }
    wrong = [
        f"{name}: {arrays[name].shape if name in arrays else 'missing'} -> {x.shape}"
        for name, x in like.items()
        if name not in arrays or arrays[name].shape != x.shape
    ]
    if wrong:
        raise ValueError("another region's state does not fit:\n- " + "\n- ".join(wrong))
    changes = {}
    for field in SHARED:
        tree = getattr(state, field)
        leaves = [place(arrays[name], x.sharding) for name, x in named_leaves(field, tree).items()]
        changes[field] = jax.tree.unflatten(jax.tree.structure(tree), leaves)
    names = named_leaves("clock", state.clock)
    clock = jax.tree.unflatten(jax.tree.structure(state.clock), [arrays[name] for name in names])
    clock = dataclasses.replace(
        clock.copy(), bytes_sent=state.clock.bytes_sent, bytes_received=state.clock.bytes_received
    )
    clock.behind = np.int64(0)  # the donor has given it in the middle of a step
    state = state.replace(**changes, clock=clock, in_flight={})
    flights = {r["key"]: _spectator(trips, r) for r in document["in_flight"] if not r["moved"]}
    state = state.replace(in_flight=flights)
    expect(trips, state)
    return state


def _spectator(trips: RoundTrips, record: dict):
    """A payload under way to which this region adds nothing."""
    shapes = abstract_flight(trips.programs, {**record, "kept": False})
    zeros = jax.tree.map(lambda x: _zeros(x) if isinstance(x, jax.ShapeDtypeStruct) else x, shapes)
    return dataclasses.replace(zeros, takes_part=np.zeros_like(zeros.takes_part))


def catch_up(engine: Engine, state: TrainState, least: int = 0) -> TrainState:
    """Land what has landed elsewhere, up to the step where the others are, and start there.

    First while they train on; then, close to them, while they wait for this region. In groups they
    wait from the beginning, since nothing is heard of other groups.

    Args:
      least: start there or later: what this region has saved and logged goes so far.
    """
    carrier, trips = engine.recipe.carrier, engine.trips(state)
    # At the step where it was lost it was waited for in vain: they must see that it is past that.
    carrier.exchange.beat(int(state.clock.step))
    # Of all others' exchanges the record is enough; a partner waits for our word at each.
    carrier.silent = engine.recipe.method.topology is None
    carrier.insists = True
    try:
        if carrier.silent:
            state = _to_the_front(trips, state, least)
        carrier.exchange.come_in()
        over = True  # once more: they may have been in an exchange when they read it
        while over or carrier.frontier() > int(state.clock.step):
            state = _to_the_front(trips, state, least)
            # Then they are soon past that one, and have told so when they are heard once more.
            over = carrier.passed_over(int(state.clock.sends.sum()))
            carrier.exchange.hear()
    finally:
        carrier.silent = carrier.insists = False
    reconnect(trips, state)  # they wait for our word on what is under way, too
    return start_from_anchor(trips, state)


def _to_the_front(trips: RoundTrips, state: TrainState, least: int) -> TrainState:
    nobody = np.zeros(1, bool)
    while (left := max(trips.carrier.frontier(), least) - int(state.clock.step)) > 0:
        state, _ = trips.after(state, min(left, trips.next_event(state)), nobody)
    return state


def start_from_anchor(trips: RoundTrips, state: TrainState) -> TrainState:
    """Take the anchor's values, the run's step and its learning rate; moments go on as they are."""
    params = trips.programs.restart(state.inner.params, state.anchor)
    inner = state.inner
    step = place(np.full(inner.step.shape, int(state.clock.step), np.int32), inner.step.sharding)
    opt = at_step(inner.opt, int(state.clock.step), np.ones(1, bool))
    return with_inner(state, params=params, opt=opt, step=step, tokens=_zeros(inner.tokens))


def _zeros(like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """Where `like` lies."""
    return place(np.zeros(like.shape, like.dtype), like.sharding)
