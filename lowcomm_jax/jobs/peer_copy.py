"""What a region at a pace of its own copies of a peer when it comes back.

A learner copies the peer's parameters and optimizer state, too. A region of asynchronous methods
takes what it would be given after an arrival, with inner moments of its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from lowcomm_jax.jobs.payload_rows import nobodys_flight
from lowcomm_jax.mesh.arrays import fetch, place
from lowcomm_jax.mesh.leader import leader
from lowcomm_jax.methods.base import Method
from lowcomm_jax.optimizers import at_step
from lowcomm_jax.rounds.state_transfer import SHARED, State, placed_like
from lowcomm_jax.state.leaves import named_leaves
from lowcomm_jax.state.train_state import TrainState, rounds_landed
from lowcomm_jax.sync.sync_loop import SyncLoop

_INNER = ("params", "rounding", "buffers", "opt")


def given_to_peers(method: Method, state: TrainState) -> State:
    """What a region that comes back copies: (rounds landed, arrays by name, document).

    The anchor, the outer state and the counters; for learners the landing rule's state, and of
    `Inner` parameters, their rounding, buffers and optimizer state. Only the first process of a job
    gets the arrays.
    """
    arrays: dict[str, Any] = named_leaves("counters", state.counters)
    for prefix, tree in _trees(method, state).items():
        arrays |= named_leaves(prefix, tree)
    reports = np.zeros(len(state.counters.sends), np.int64)
    for flight in state.in_flight.values():
        reports[int(flight.fragment)] += 1
    document = {"landed": (state.counters.sends - reports).tolist()}
    return rounds_landed(state), fetch(arrays, here=leader().leads), document


def start_from_peer(
    loop: SyncLoop, state: TrainState, arrays: dict[str, np.ndarray], document: dict
) -> TrainState:
    """The state of a region that has copied a peer (`given_to_peers`).

    It is at the peer's round. Its own step stays, or becomes the peer's if that is later, so that
    no sample is read twice. Counts since a fragment was received start again.

    Raises:
      ValueError: the arrays are of another model or method; lists every difference.
    """
    copied = placed_like(_trees(loop.method, state), arrays, "a peer's")
    counters = state.counters.copy()
    step = np.int64(max(int(counters.step), int(arrays["counters/step"])))
    counters = dataclasses.replace(counters, step=step, behind=np.int64(0))
    counters.sends[:] = document["landed"]
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
    return () if method.base == "received" else _INNER


def _trees(method: Method, state: TrainState) -> dict[str, Any]:
    """What is copied, by the prefix of its arrays' names."""
    fields = SHARED if method.base == "received" else (*SHARED, "landing")
    trees = {field: getattr(state, field) for field in fields}
    return trees | {f"inner/{field}": getattr(state.inner, field) for field in _inner(method)}
