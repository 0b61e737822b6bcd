"""The loop of independent learners: rounds with their own members, and recovery from a peer.

A round takes the values of the learners that were admitted when it closed (`schedule.learners`).
When it lands, every learner that is up, admitted or not, replaces its local values by the fragment,
and its counts for that fragment start again. A learner that is down receives nothing; when it comes
back it copies a peer.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.exchange import Traffic
from lowcomm_jax.history import Event
from lowcomm_jax.state.train_state import InFlight, TrainState, with_inner
from lowcomm_jax.sync.initial_state import codec_states
from lowcomm_jax.sync.round_programs import RoundPrograms
from lowcomm_jax.sync.sync_loop import SyncLoop

PyTree = Any


class LearnerLoop(SyncLoop):
    """`SyncLoop` for `schedule.Learners`."""

    def __init__(self, programs: RoundPrograms, weights: str | np.ndarray):
        super().__init__(programs, weights)
        self.by_rate = self.schedule.admission.weights == "token_rate"
        self._now = 0  # the tick whose landings are done

    def events_at(self, state: TrainState, mask: np.ndarray, events: list[Event]) -> TrainState:
        """Run landings, sends, landings of delay 0, then the copies of learners that come back."""
        state = super().events_at(state, mask, events)
        step = int(state.counters.step)
        for region in np.flatnonzero(self.schedule.returns(step, self.count)):
            state = self.recover(state, int(region), step, events)
        return state

    # -- rounds -----------------------------------------------------------------------------------

    def send_due(
        self, state: TrainState, mask: np.ndarray, events: list[Event]
    ) -> tuple[TrainState, tuple[int, ...]]:
        step = int(state.counters.step)
        rounds = self.schedule.rounds_closing(step, self.count)
        for found in rounds:
            admitted = mask & found.admitted
            state = self.send(state, found.fragment, step, admitted, events)
        return state, tuple(found.fragment for found in rounds)

    def send(self, state, p: int, step: int, mask: np.ndarray, events: list[Event]) -> TrainState:
        """As `SyncLoop.send`, from the learners that are up, also at the end."""
        return super().send(state, p, step, mask & self.schedule.up(step, self.count), events)

    def waiting(self, mask: np.ndarray) -> np.ndarray:
        """Every learner waits for the landing, admitted or not; `adopters` says who is up then."""
        return np.ones_like(mask)

    def due_at(self, p: int, step: int) -> np.ndarray:
        lands = [r.lands for r in self.schedule.rounds_closing(step, self.count) if r.fragment == p]
        return np.full(self.count, lands[0] if lands else step, np.int64)

    def adopters(self, flight: InFlight, due_R: np.ndarray) -> np.ndarray:
        return due_R & self.schedule.up(self._now, self.count)

    def land(self, state, keys, step: int, events) -> TrainState:
        self._now = step
        return super().land(state, keys, step, events)

    def adopt(self, state, p: int, flight: InFlight, lands: np.ndarray, step: int) -> TrainState:
        """As `SyncLoop.adopt`; the counts since this fragment was received start again."""
        state = super().adopt(state, p, flight, lands, step)
        if not self.by_rate:
            return state
        return with_inner(state, tokens=_restart(state.inner.tokens, lands, np.int32(p)))

    def _base_weights(self, state: TrainState, p: int) -> jax.Array | np.ndarray:
        """c_tokens (c_tokens / c_steps), counted since the fragment was received."""
        if not self.by_rate:
            return super()._base_weights(state, p)
        landed_R = np.maximum(state.counters.last_landed[p], 0)
        before_R = [self.schedule.made(int(t), self.count)[r] for r, t in enumerate(landed_R)]
        steps = self.schedule.made(int(state.counters.step), self.count) - np.array(before_R)
        return _rate(state.inner.tokens, np.float32(np.maximum(steps, 1)), np.int32(p))

    # -- recovery ---------------------------------------------------------------------------------

    def recover(self, state: TrainState, region: int, step: int, events: list[Event]) -> TrainState:
        """Let a learner that comes back copy a peer that is up.

        It takes parameters, optimizer state, buffers and landing state of the lowest-numbered one;
        its codec state and its counts start anew.
        """
        peer = int(np.flatnonzero(self.schedule.up(step, self.count))[0])
        copied = {
            "params": state.inner.params,
            "rounding": state.inner.rounding,
            "buffers": state.inner.buffers,
            "opt": state.inner.opt,
            "landing": state.landing,
        }
        nbytes = sum(x.nbytes // self.count for x in jax.tree.leaves(copied))
        fresh = codec_states(self.programs)
        got, codec, tokens = _copy(
            copied, state.codec, fresh, state.inner.tokens, np.int32(region), np.int32(peer)
        )
        counters = state.counters.copy()
        counters.last_landed[:, region] = step
        moved = Traffic("copy", nbytes, *_one_way(self.count, peer, region, nbytes))
        counters.bytes_sent += moved.sent
        counters.bytes_received += moved.received
        who = np.arange(self.count) == region
        event = Event.of_send(step, -1, None, who, moved, {})
        events.append(dataclasses.replace(event, kind="recover"))
        inner = {name: got[name] for name in ("params", "rounding", "buffers", "opt")}
        state = state.replace(codec=codec, landing=got["landing"], counters=counters)
        return with_inner(state, **inner, tokens=tokens)


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


@jax.jit
def _restart(tokens_RxK: jax.Array, lands_R: jax.Array, p: jax.Array) -> jax.Array:
    return tokens_RxK.at[:, p].set(jnp.where(lands_R, 0.0, tokens_RxK[:, p]))


@jax.jit
def _rate(tokens_RxK: jax.Array, steps_R: jax.Array, p: jax.Array) -> jax.Array:
    return tokens_RxK[:, p] * (tokens_RxK[:, p] / steps_R)
