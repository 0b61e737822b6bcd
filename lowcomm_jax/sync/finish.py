"""The end of training: land what is in flight, then one last blocking synchronisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lowcomm_jax.history import Event
from lowcomm_jax.schedule.base import Adopt, Move, Send, View
from lowcomm_jax.state.train_state import TrainState, in_send_order
from lowcomm_jax.sync.carrier import LastCarrier

AtTheEnd = Callable[[int], Sequence[bool]] | None


def finish(
    loop: Any, state: TrainState, participants: AtTheEnd = None
) -> tuple[TrainState, list[Event]]:
    """Land payloads in send order, then synchronise every fragment once more, blocking.

    Payloads in flight land by the method's landing rule, as during training. One that replaces
    (`landing=None`) drops the steps that a region made since the send: they enter no anchor, and
    the last synchronisation of that fragment finds no progress. A rule that keeps a share of these
    steps (`landing.blend`, `replay`) hands that share in. One-period methods hand all of them in.

    A mean of exactly 0 does not move the anchor, so that finishing twice is the same as once. With
    gossip the last synchronisation is one more round in groups: every region ends on its own
    anchor, and the model is any of them or their mean.

    Args:
      loop: a `SyncLoop`, of the state's layout.
      state: is donated; use the returned one.
      participants: fragment -> bool `[R]`: who takes part in its last synchronisation; None =
        everyone.

    Returns:
      (state, events): every region's trained leaves equal its anchor.

    Raises:
      exchange.Parted: regions that are jobs of their own end with different anchors.
    """
    events: list[Event] = []
    everyone, carrier = np.ones(loop.count, bool), loop.carrier
    with carrier.ending(loop, state) as last:
        state = loop.run_due(state, everyone, events)
    loop.carrier = last
    try:
        return _synchronised(loop, last, state, participants, events), events
    finally:
        loop.carrier = carrier


def _synchronised(
    loop: Any,
    last: LastCarrier,
    state: TrainState,
    participants: AtTheEnd,
    events: list[Event],
) -> TrainState:
    """The state after the last synchronisation; `last`: the loop's carrier meanwhile."""
    everyone = np.ones(loop.count, bool)
    state, step = state.replace(counters=state.counters.copy()), int(state.counters.step)
    if not loop.schedule.land_after_send:
        state = loop.land_now(state, events)
    over = last.ended_before(state)
    for p in range(len(loop.fragments)):
        mask = everyone if participants is None else np.asarray(participants(p), bool)
        state = _last_round(loop, None if over else last, state, p, step, mask, events)
    last.close(loop, state)
    return state


def _last_round(
    loop: Any,
    last: LastCarrier | None,
    state: TrainState,
    p: int,
    step: int,
    mask: np.ndarray,
    events: list[Event],
) -> TrainState:
    """Synchronise fragment p; `last`: None = the others have done so without the regions here."""
    # A one-period method may have sent at this very step: land that, and those who sent are done.
    state = _drain(loop, state, p, step, events, sent=step)
    applied = True
    if last is not None and not _all_adopted(loop, last, state, p, step):
        # Whether the payload of an earlier boundary waits; if not, no boundary adds own parts.
        applied = any(f.fragment == p for f in state.in_flight.values())
        act = Send((p,))
        if not loop.separate:
            act = loop.schedule.at_the_end(step, p, state.counters)
        state = loop.send(state, act, step, mask, events)
        if applied:
            # One more boundary, so that the steps since the last one are not lost.
            view = View(state.counters, in_send_order(state.in_flight), loop.count)
            stage = loop.schedule.crossing(step, p, view)
            state = loop.do(state, stage, mask, True, events)
    state = _drain(loop, state, p, step, events, sent=None, applied=applied)
    state = loop.restart(state, p)
    # Whatever was handed out before: from here all have the anchor itself.
    return loop.mark_received(state, p, np.ones(loop.count, bool)) if state.received else state


def _all_adopted(loop: Any, last: LastCarrier, state: TrainState, p: int, step: int) -> bool:
    """Whether every region adopted the anchor as it is at this very step."""
    here = bool((state.counters.last_landed[p] == step).all())
    return loop.method.landing_of(p) is None and last.everyone_landed(state, p, step, here)


def _drain(
    loop: Any, state, p: int, step: int, events, sent: int | None, applied: bool = True
) -> TrainState:
    """Land payloads of fragment p sent at step `sent` (None: all); the regions that sent adopt.

    Args:
      applied: as in `Move`.
    """
    for key, flight in in_send_order(state.in_flight):
        if flight.fragment != p or (sent is not None and flight.sent != sent):
            continue
        move, act = Move(key, applied=applied), Adopt(p, key, flight.takes_part)
        state, values = loop.move(state, move, True, ends=True, last=sent is None)
        state = loop.adopt_payload(state, act, step, True, values, events, ends=True)
    return state
