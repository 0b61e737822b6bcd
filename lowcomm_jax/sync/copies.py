"""Copies of a peer: what a region that comes back takes over, in one program."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from lowcomm_jax.exchange import Traffic
from lowcomm_jax.history import Event
from lowcomm_jax.schedule.base import Copy
from lowcomm_jax.state.train_state import TrainState, with_inner
from lowcomm_jax.sync.initial_state import codec_states
from lowcomm_jax.sync.round_programs import RoundPrograms

PyTree = Any


def copy_peer(
    programs: RoundPrograms, state: TrainState, act: Copy, step: int
) -> tuple[TrainState, Event]:
    """Let a region that comes back copy a peer.

    It takes parameters, optimizer state, buffers and landing state; its codec state and its counts
    start anew.

    Returns:
      (state, the event of kind `recover`, with its bytes).
    """
    region, peer, count = act.region, act.peer, programs.regions.count
    copied = {
        "params": state.inner.params,
        "rounding": state.inner.rounding,
        "buffers": state.inner.buffers,
        "opt": state.inner.opt,
        "landing": state.landing,
    }
    nbytes = sum(x.nbytes // count for x in jax.tree.leaves(copied))
    fresh = codec_states(programs)
    got, codec, tokens = _copy(
        copied, state.codec, fresh, state.inner.tokens, np.int32(region), np.int32(peer)
    )
    counters = state.counters.copy()
    counters.last_landed[:, region] = step
    moved = Traffic("copy", nbytes, *_one_way(count, peer, region, nbytes))
    counters.count_bytes(moved.sent, moved.received)
    who = np.arange(count) == region
    event = dataclasses.replace(Event.of_send(step, -1, None, who, moved, {}), kind="recover")
    inner = {name: got[name] for name in ("params", "rounding", "buffers", "opt")}
    state = state.replace(codec=codec, landing=got["landing"], counters=counters)
    return with_inner(state, **inner, tokens=tokens), event


def _one_way(count: int, peer: int, region: int, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    sent, received = np.zeros(count, np.int64), np.zeros(count, np.int64)
    sent[peer], received[region] = nbytes, nbytes
    return sent, received


@jax.jit
def _copy(tree: PyTree, codec: PyTree, fresh: PyTree, tokens_RxK, region, peer):
    """Rows of `region` as those of `peer`; its codec state fresh and its tokens 0."""
    copied = jax.tree.map(lambda x: x.at[region].set(x[peer]), tree)
    codec = jax.tree.map(lambda x, new: x.at[region].set(new[region]), codec, fresh)
    return copied, codec, tokens_RxK.at[region].set(0.0)
