"""Run the programs of gradient-exchanging methods and book what they send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from lowcomm_jax.exchange import two_shot
from lowcomm_jax.history import Event
from lowcomm_jax.programs import Programs
from lowcomm_jax.state import TrainState, flight_key

PyTree = Any


def run_gradient_steps(
    programs: Programs,
    state: TrainState,
    batches: PyTree,
    region_ids: jax.Array,
    masks: Sequence[np.ndarray],
    weight: np.ndarray | None,
    capacity: int,
    single: bool,
):
    """The staged steps of `masks`, one mask `[R]` each; returns (state, events, metrics).

    `weight`: float32 `[R]`, or None for the tokens of each step.
    """
    padded = np.ones((masks[0].size, capacity), bool)
    padded[:, : len(masks)] = np.stack(masks, axis=1)
    n = np.int32(len(masks))
    carry, metrics = programs.block(
        _carry(state), state.frozen, batches, region_ids, padded, weight, n, single=single
    )
    return *_book(programs, state, carry, masks), metrics


def _carry(state: TrainState):
    return state.inner, state.anchor, state.outer[0], state.codec[0]


def _book(programs: Programs, state: TrainState, carry, masks) -> tuple[TrainState, list[Event]]:
    """Advance the clock and count the bytes of every step."""
    inner, anchor, outer, codec = carry
    clock, events = state.clock.copy(), []
    like = programs.fragments.like(0)
    buffers = programs.averaged_bytes()
    for mask in masks:
        clock.step = np.int64(clock.step + 1)
        step = int(clock.step)
        traffic = programs.exchange.traffic(like, mask).plus(two_shot(buffers, mask))
        clock.bytes_sent += traffic.sent
        clock.bytes_received += traffic.received
        clock.previous_sent[0], clock.last_sent[0] = clock.last_sent[0], step
        clock.last_landed[0], clock.staleness[0] = step, 0
        clock.sends[0] += 1
        key = flight_key(0, step)
        events.append(Event.of_send(step, 0, key, mask, traffic, {}))
        events.append(Event.of_landing(step, 0, key, mask, 0, {}))
    changes = {"inner": inner, "anchor": anchor, "outer": (outer,), "codec": (codec,)}
    return state.replace(**changes, clock=clock), events
