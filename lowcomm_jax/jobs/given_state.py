"""What a region that comes back is given of another one's state, and takes over.

All regions have the anchor, the outer state and the counters in common. A learner copies the peer's
parameters and optimizer state, too. A region of asynchronous methods takes what it would be given
after an arrival, with inner moments of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from lowcomm_jax.jobs.payload_rows import nobodys_flight
from lowcomm_jax.mesh.arrays import fetch, host_form, place, place_like
from lowcomm_jax.mesh.leader import leader
from lowcomm_jax.methods.base import Method
from lowcomm_jax.optimizers import at_step
from lowcomm_jax.refused import Refused
from lowcomm_jax.rounds.state_transfer import State
from lowcomm_jax.state.leaves import flight_records, named_leaves
from lowcomm_jax.state.train_state import TrainState, rounds_landed
from lowcomm_jax.sync.sync_loop import SyncLoop

PyTree = Any

_SHARED = ("anchor", "outer", "rate", "merge")
_INNER = ("params", "rounding", "buffers", "opt")


def position(method: Method, state: TrainState) -> int:
    """How far a state is, in what all regions have in common: steps, or rounds."""
    return rounds_landed(state) if method.schedule.by_rounds else int(state.counters.step)


def shared_trees(method: Method, state: TrainState) -> dict[str, Any]:
    """What a region that comes back takes over besides counters, by the prefix of their names."""
    inner = _inner(method)
    trees = {field: getattr(state, field) for field in (*_SHARED, *["landing"] * bool(inner))}
    return trees | {f"inner/{field}": getattr(state.inner, field) for field in inner}


def given(state: Any, method: Method) -> State:
    """What a region that comes back is given: (position, arrays by name, document).

    The document has the records of payloads. Only the first process of a job gets the arrays.

    Args:
      state: a `TrainState`, or several trainers'.
    """
    named: dict[str, Any] = {}
    for prefix, part in state.parts.items():
        for field, tree in {"counters": part.counters, **shared_trees(method, part)}.items():
            named |= named_leaves(prefix + field, tree)
    arrays = fetch(named, here=leader().leads)
    flights = [record for part in state.parts.values() for record in flight_records(part)]
    return position(method, state), arrays, {"in_flight": flights, **state.document()}


def placed_like(
    trees: Mapping[str, PyTree],
    arrays: Mapping[str, np.ndarray],
    document: Mapping[str, Any],
    counters: Iterable[str],
    whose: str,
) -> dict[str, PyTree]:
    """Another region's arrays, placed as this region's trees are; by the same prefixes.

    Args:
      trees: by the prefix of their leaves' names.
      document: what came with the arrays.
      counters: names of further arrays that must be there.
      whose: begins the error: "another region's".

    Raises:
      ValueError: the arrays are of another model or method, or the counters or the records of
        payloads are missing; lists every difference.
    """
    likes = {prefix: named_leaves(prefix, tree) for prefix, tree in trees.items()}
    differ = [
        f"{name}: {arrays[name].shape if name in arrays else 'missing'} -> {x.shape}"
        for like in likes.values()
        for name, x in jax.tree.map(host_form, like).items()
        if name not in arrays or arrays[name].shape != x.shape
    ]
    differ += [f"{name}: missing" for name in counters if name not in arrays]
    if "in_flight" not in document:
        differ.append("in_flight: missing")
    if differ:
        raise Refused(f"{whose} state does not fit", differ)

    def placed(prefix: str) -> PyTree:
        leaves = [place_like(arrays[name], x) for name, x in likes[prefix].items()]
        return jax.tree.unflatten(jax.tree.structure(trees[prefix]), leaves)

    return {prefix: placed(prefix) for prefix in trees}


def start_from_peer(
    loop: SyncLoop, state: TrainState, arrays: dict[str, np.ndarray], document: dict
) -> TrainState:
    """The state of a region at a pace of its own that has copied a peer (`given`).

    It is at the peer's round. Its own step stays, or becomes the peer's if that is later, so that
    no sample is read twice. Counts since a fragment was received start again.

    Raises:
      ValueError: the arrays are of another model or method; lists every difference.
    """
    needed = [f"counters/{name}" for name in ("step", "sends", "last_sent")]
    copied = placed_like(shared_trees(loop.method, state), arrays, document, needed, "a peer's")
    counters = state.counters.copy()
    step = np.int64(max(int(counters.step), int(arrays["counters/step"])))
    counters = dataclasses.replace(counters, step=step, behind=np.int64(0))
    counters.sends[:] = arrays["counters/sends"]
    for flight in document["in_flight"]:  # a report that has not landed
        counters.sends[flight["fragment"]] -= 1
    counters.last_landed[:] = step
    counters.last_sent[:], counters.previous_sent[:] = arrays["counters/last_sent"], -1
    zeros = np.zeros(state.inner.tokens.shape, np.float32)
    own = {field: copied.pop(f"inner/{field}") for field in _inner(loop.method)}
    own["tokens"] = place(zeros, state.inner.tokens.sharding)
    made = np.full(state.inner.step.shape, step, np.int32)
    own["step"] = place(made, state.inner.step.sharding)
    inner = dataclasses.replace(state.inner, **own)
    state = state.replace(inner=inner, in_flight={}, counters=counters, **copied)
    if loop.method.base == "received":
        everyone, flight = np.ones(1, bool), nobodys_flight(0, int(step))
        # As if it landed now: rules are told its round.
        state = loop.adopt(state.replace(in_flight={"": flight}), 0, flight, everyone, int(step))
        inner = dataclasses.replace(state.inner, opt=at_step(state.inner.opt, int(step), everyone))
        state = state.replace(inner=inner, in_flight={})
    return state


def _inner(method: Method) -> tuple[str, ...]:
    """Fields of `Inner` that are copied."""
    copies = method.schedule.by_rounds and method.base != "received"
    return _INNER if copies else ()
