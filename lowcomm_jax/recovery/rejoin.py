"""How a region joins a run that goes on: `enter` at the beginning, `serve` at the end.

`enter` compiles (`precompile`), takes the newest state of another region (`install`), compares its
anchor with the others', and lands the payloads it has missed since (`catch_up`). Then the region
makes steps of its own. The regions that train do not wait for it, until it is close.

Progress that a lost region had not sent is lost. It starts from the anchor, with codecs as at step
0 (residuals of 0) and its own inner optimizer state: that of its checkpoint, or a fresh one.
`enter` raises `Lost` where no region gave a state, `Parted` where the state is not the others'.

A region at a pace of its own copies a peer instead (`jobs.given_state`). Of several trainers the
state has all that live, with their requests and policies, and was given at the end of a round.
Rounds that are only landed grow batches and merge trainers as in the other regions, since both
follow from what was landed. `rejoin_regions` does what `enter` does, where all regions are in one
process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from lowcomm_jax.adloco.engine import AdaptiveEngine, Goal, Source
from lowcomm_jax.adloco.state import AdaptiveState
from lowcomm_jax.checkpoint.target import abstract_flight
from lowcomm_jax.engine import Engine
from lowcomm_jax.jobs.anchor_history import anchor_version
from lowcomm_jax.jobs.given_state import placed_like, shared_trees, start_from_peer
from lowcomm_jax.jobs.job_carrier import JobCarrier, start_from_anchor, wait_for_donors
from lowcomm_jax.mesh.arrays import host_form, place_like
from lowcomm_jax.optimizers import at_step
from lowcomm_jax.params_view import anchors
from lowcomm_jax.recovery.precompile import precompile
from lowcomm_jax.rounds.remote import RemoteExchange
from lowcomm_jax.rounds.state_transfer import State
from lowcomm_jax.state.channel_flights import left_by
from lowcomm_jax.state.leaves import named_leaves, trainer_prefix
from lowcomm_jax.state.train_state import InFlight, TrainState
from lowcomm_jax.store.errors import Rejected, StoreUnavailable
from lowcomm_jax.sync.initial_state import codec_states
from lowcomm_jax.sync.round_functions import select
from lowcomm_jax.sync.sync_loop import SyncLoop

T = TypeVar("T", TrainState, AdaptiveState)
log = logging.getLogger(__name__)
_POLL_SECONDS = 0.05
_COMPARE_SECONDS = 10.0  # regions tell at their next landing, perhaps after the donor's


def enter(
    engine: Engine | AdaptiveEngine,
    state: T,
    example: Any,
    say: Callable[[str], object] = lambda line: None,
) -> T:
    """Join a run that goes on, after `exchange.join`; returns at once at the run's beginning.

    Where the others have ended, and are gone, it takes their result.

    Args:
      state: fresh, or restored from a checkpoint of this region; is donated.
      example: a host batch like those of `Engine.run`, or the source of an `AdaptiveEngine`, to
        compile the inner steps with; it is not trained on.
      say: is told in a line what begins or is over, each time.

    Returns:
      the state at the others' step.

    Raises:
      Lost: no region gave a state.
      Unreadable: a signed record of a state is none; it ends those who give states, too.
      Parted: anchors differ, and that of the given state is not the one that is kept.
      Rejected: the state that the others left at their end is damaged, or that of trainers.
      ValueError: the state is of another model or method; lists every difference.
    """
    if engine.carrier.exchange.awaited:
        return state
    own = int(state.counters.step)
    say("programs are compiled or loaded")
    compiled = engine.warm(_precompiled(engine, state), example)
    say("programs are ready")
    return _entered(engine, compiled, example, own, say)


def _entered(
    engine: Engine | AdaptiveEngine,
    state: Any,
    example: Any,
    own: int,
    say: Callable[[str], object],
) -> Any:
    """`enter` with a state whose programs are compiled; `own`: the step of this region's state."""
    exchange, loop = engine.carrier.exchange, engine.sync_loop(state)
    result, least = exchange.result(), own
    if result is None and not loop.by_rounds:
        least = max(own, exchange.sent_before())
    given = newest(exchange) if result is None else result
    at, arrays, document = given
    say(f"a state of {'round' if loop.by_rounds else 'step'} {at} is here")
    if isinstance(engine, AdaptiveEngine):
        state = install_trainers(engine, state, arrays, document)
        if result is None:
            state = catch_up_trainers(engine, state, example, least)
        return engine.start_from_anchors(state)
    if loop.by_rounds:
        return _copy_peer(engine.carrier, loop, state, given, ended=result is not None)
    if result is None:
        state = catch_up(engine, _installed(engine, state, given), least)
    else:
        state = install(loop, state, arrays, document)
    return start_from_anchor(loop, state)


def _precompiled(engine: Engine | AdaptiveEngine, state: T) -> T:
    """`precompile`; of several trainers one, since all have the same programs."""
    if isinstance(state, TrainState):
        return precompile(engine, state)
    [number, *_] = state.trainers
    played = precompile(engine.engines[number], state.first.state)
    return state.with_trainer(number, state.first.replace(state=played))


def _installed(engine: Engine, state: TrainState, given: State) -> TrainState:
    """`install` of another region's state, once its anchor is the others', too."""
    carrier, loop = engine.carrier, engine.sync_loop(state)
    compiled = {loop.schedule.level(state.counters)}
    while True:
        _, arrays, document = given
        carrier.anchor_history.forget()
        state = install(loop, state, arrays, document)
        _compare(carrier, loop, state)
        level = loop.schedule.level(state.counters)
        if level in compiled:
            return state
        # The run has come to another level of its codec, which has other programs.
        state = precompile(engine, state)
        compiled.add(level)
        given = newest(carrier.exchange)


def _copy_peer(
    carrier: JobCarrier, loop: SyncLoop, state: TrainState, given: State, ended: bool
) -> TrainState:
    """A region at a pace of its own copies a peer, or, once all have `ended`, their result.

    What was committed since the peer gave its state it lands by itself: payloads stay meanwhile.
    Its anchor is compared with those of the others at every round it lands.
    """
    exchange = carrier.exchange
    _, arrays, document = given
    state = start_from_peer(loop, state, arrays, document)
    exchange.beat(carrier.position(state))
    if not ended:
        exchange.come_in()
    return state


def newest(exchange: RemoteExchange) -> State:
    """Ask the others for a state, and wait until one has given it.

    Raises:
      Lost: no region gave a state.
    """
    exchange.want_state()
    # Asked for within the decision: of a region's processes the first alone takes part.
    return wait_for_donors(exchange, "one gave its state", lambda: exchange.state_transfer.newest())


def _compare(carrier: JobCarrier, loop: SyncLoop, state: TrainState) -> None:
    """Check that the anchor is the one that the training regions had at that version.

    Raises:
      Parted: anchors differ, and this region's is not the one that is kept (`heal`).
    """
    exchange, until = carrier.exchange, time.monotonic() + _COMPARE_SECONDS
    own = carrier.anchor_history.terms(state.anchor, loop.fragments)
    step, version = int(state.counters.step), anchor_version(state)
    if not own:
        return  # regions have anchors of their own

    def look() -> bool | None:
        at_last = time.monotonic() > until
        return exchange.state_transfer.anchors_agree(step, version, own, at_last) or None

    wait_for_donors(exchange, "they told of their anchors", look)


def serve(engine: Engine, state: TrainState, linger_s: float = 30.0) -> None:
    """After the end, give the state to regions that join now, for at most `linger_s` seconds.

    For as long, it also stays for regions that lack payloads which would be gone with it. The state
    stays in the store, if some region was absent at the end, or has not got all by then.

    Args:
      linger_s: 0 = leave the state where it is missed, and give it to nobody.
    """
    carrier, until = engine.carrier, time.monotonic() + linger_s
    while linger_s and carrier.exchange.is_needed(until):
        carrier.answer(state)
        time.sleep(_POLL_SECONDS)
    if carrier.exchange.misses(carrier.position(state)):
        result = carrier.given(state)
        try:
            carrier.exchange.leave_result(result)
        except StoreUnavailable as error:
            log.warning("regions that come back will not find the result: %s", error)


def install(
    loop: SyncLoop, state: TrainState, arrays: dict[str, np.ndarray], document: dict
) -> TrainState:
    """Replace the arrays that regions have in common by another region's.

    Args:
      state: of `precompile`.
      arrays, document: another region's state, as `rounds.state_transfer` gives it. Where its
        `SyncCounters.behind` is 1 the donor stood within its step, and the rest is still to be done
        (`JobCarrier.reach`).

    Raises:
      ValueError: the arrays are of another model or method; lists every difference.
    """
    trees = shared_trees(loop.method, state)
    names = named_leaves("counters", state.counters)
    changes = placed_like(trees, arrays, document, names, "another region's")
    counters = jax.tree.unflatten(
        jax.tree.structure(state.counters), [arrays[name] for name in names]
    )
    counters = dataclasses.replace(
        counters.copy(),
        bytes_sent=state.counters.bytes_sent,
        bytes_received=state.counters.bytes_received,
    )
    state = state.replace(**changes, counters=counters, in_flight={})
    flights = {r["key"]: _spectator(loop, r) for r in document["in_flight"] if not r["moved"]}
    state = state.replace(in_flight=flights)
    with loop.carrier.acting(sends=False):
        loop.carrier.reconnect(loop, state)
    return state


def install_trainers(
    engine: AdaptiveEngine, state: AdaptiveState, arrays: dict[str, np.ndarray], document: dict
) -> AdaptiveState:
    """Replace what regions have in common by another region's; see `install`.

    Args:
      arrays, document: as `JobCarrier.given` gives them.

    Raises:
      Rejected: the document is damaged.
      ValueError: the state is of another model or method, or has trainers that this one lacks.
    """
    given = _trainers(document, state)
    lacks = given.trainers.keys() - state.trainers.keys()
    if lacks or not given.trainers:
        raise ValueError(
            f"another region's state has the trainers {sorted(given.trainers)}, this one "
            f"{sorted(state.trainers)}: start all regions with the same method"
        )
    state = state.without(*state.trainers.keys() - given.trainers.keys())
    for number, own, loop in engine.loops(state):
        trainer, prefix = given.trainers[number], trainer_prefix(number)
        theirs = {k.removeprefix(prefix): x for k, x in arrays.items() if k.startswith(prefix)}
        # Residuals of payloads that were counted since must not be sent again.
        fresh = own.state.replace(codec=codec_states(loop.programs))
        placed = install(loop, fresh, theirs, {"in_flight": []})
        # What it has measured are the other region's numbers.
        state = state.with_trainer(number, trainer.replace(state=placed, measured=None))
    return state.replace(samples=given.samples)


def _trainers(document: dict, state: AdaptiveState) -> AdaptiveState:
    """What a document says of all trainers, alike what this state has; raises `Rejected`."""
    try:
        found = AdaptiveState.of_document(document.get("trainers"))
    except msgspec.ValidationError as error:
        raise Rejected(f"the document of a state: {error}") from None
    for one in found.trainers.values():
        if one.policy.keys() != state.first.policy.keys():
            raise Rejected("the policy of another method")
        if not all(map(math.isfinite, one.policy.values())):
            raise Rejected("a policy with numbers that are not finite")
    return found


def _spectator(loop: SyncLoop, record: dict):
    """A payload in flight to which this region adds nothing."""
    shapes = abstract_flight(loop.programs, {**record, "kept": False})
    zeros = jax.tree.map(lambda x: _zeros(x) if isinstance(x, jax.ShapeDtypeStruct) else x, shapes)
    return dataclasses.replace(zeros, takes_part=np.zeros_like(zeros.takes_part))


def catch_up(engine: Engine, state: TrainState, least: int = 0) -> TrainState:
    """Land the payloads that the others landed, up to their step, and take part from there.

    Args:
      least: see `come_in`.
    """
    carrier, loop, nobody = engine.carrier, engine.sync_loop(state), np.zeros(1, bool)
    # Among all regions the records are enough; in groups a partner waits for our announcement.
    listens = carrier.group_size is None

    def advance(state: TrainState, step: int) -> TrainState:
        steps = min(step - int(state.counters.step), loop.next_event(state))
        return loop.after(state, steps, nobody)[0]

    def passed_over(state: TrainState) -> bool:
        return carrier.passed_over(int(state.counters.sends.sum()))

    # The others waited for it in vain at the step where it was lost: they must see it is past that.
    carrier.exchange.beat(int(state.counters.step))
    with carrier.acting(defers=False, sends=not listens):
        if listens:
            # The donor may have stood within its step, in an exchange that goes on.
            state = loop.run_due(state, nobody, [])
        state = come_in(carrier, state, advance, passed_over, least)
        # The others have trained on meanwhile: beside them it makes the next send in time.
        near = carrier.exchange.frontier() - int(state.counters.step)
        if (near := min(near, loop.next_event(state) - 1)) > 0:
            state, _ = loop.after(state, near, nobody)
    # The others wait for our announcement in what is under way, too.
    carrier.reconnect(loop, state)
    return state


def catch_up_trainers(
    engine: AdaptiveEngine, state: AdaptiveState, source: Source, least: int
) -> AdaptiveState:
    """Land the rounds that the others landed, up to their step; see `catch_up`."""

    def advance(state: AdaptiveState, step: int) -> AdaptiveState:
        return engine.pass_steps(state, source, Goal(step))

    def passed_over(state: AdaptiveState) -> bool:
        sends = int(state.counters.sends.sum())
        return any([loop.carrier.passed_over(sends) for _, _, loop in engine.loops(state)])

    engine.carrier.exchange.beat(state.step)
    with contextlib.ExitStack() as entered:
        for _, _, loop in engine.loops(state):
            entered.enter_context(loop.carrier.acting(sends=False))
        return come_in(engine.carrier, state, advance, passed_over, least)


def come_in(
    carrier: JobCarrier,
    state: T,
    advance: Callable[[T, int], T],
    passed_over: Callable[[T], bool],
    least: int = 0,
) -> T:
    """Land what the others land, tell them that this region takes part again, and go on landing
    until they know.

    At first the others train on; when this region is close, they wait for it. With gossip they wait
    from the beginning, since a region does not see the exchanges of other groups. From then on it
    lands what is done elsewhere, and no more. One that was cut off has made further steps: what is
    due in them it does with this region, and waits for it.

    Args:
      advance: lands what the others landed, towards this step.
      passed_over: whether they go on without this region in the next exchange.
      least: go to this step or later: up to it go this region's checkpoint and log, and what the
        job before it sent. The others may count that payload, and not one of ours beside it.
    """
    exchange = carrier.exchange

    def forward(state: T, done: bool) -> T:
        while (step := max(exchange.frontier(done), least)) > int(state.counters.step):
            state = advance(state, step)
        return state

    if carrier.group_size is None:
        state = forward(state, False)
    exchange.come_in()
    over = True  # once more: the others may have been in an exchange when they read that
    while over or exchange.frontier(done=True) > int(state.counters.step):
        state = forward(state, True)
        # If so, the others are soon past that exchange, and tell so with their next beats.
        over = passed_over(state)
        exchange.wait_for_beats()
    return state


def _zeros(like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros with the shape, dtype and sharding of `like`."""
    on_host = host_form(like)
    return place_like(np.zeros(on_host.shape, on_host.dtype), like)


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
    params, rounding = loop.programs.restart_program(
        inner.params, anchors(state), inner.rounding, {}
    )
    new = dataclasses.replace(
        first,
        params=params,
        rounding=rounding,
        step=inner.step,
        tokens=jnp.zeros_like(inner.tokens),
    )
    inner = _select_state(comes_R, new, inner)
    opt = at_step(inner.opt, int(state.counters.step), comes_R)
    codec, landing = _select_state(
        comes_R, (fresh.codec, fresh.landing), (state.codec, state.landing)
    )
    if state.received:
        for p in range(len(loop.fragments)):
            state = loop.mark_received(state, p, comes_R)
    left = {key: _left_by(flight, comes_R) for key, flight in state.in_flight.items()}
    return state.replace(
        inner=dataclasses.replace(inner, opt=opt),
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
