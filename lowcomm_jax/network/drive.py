"""Runs the virtual clock beside training, from the events that the engine or its records report.

`drive` advances a clock by one step of a run, `follow` by the events of a step, `replay` by a whole
finished run. `every_step` is the baseline of every "faster than AllReduce": fp32 gradients that all
regions exchange at every step, two-shot, as `methods.ddp` does.

Learning never waits for the clock and never looks at it. So a finished run can be replayed on any
network from its metrics alone.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from lowcomm_jax.network.clock import VirtualClock
from lowcomm_jax.network.links import Network
from lowcomm_jax.network.routes import HEARD

BASELINE = "AllReduce: fp32 gradients exchanged at every step, two-shot"
RECOVERY = "recovery"  # the ledger's label of what a learner copies that comes back
ACTIVATIONS = "activations"  # the ledger's label of what is routed between stages
LEFT_OUT = {"trainer": None, "channel": None}  # `Event.fetch` leaves these out


def drive(
    clock: VirtualClock,
    step: int,
    events: Iterable[Any],
    active: Sequence[bool] | None = None,
    away: Sequence[bool] | None = None,
    work: float | Sequence[float] | None = None,
) -> None:
    """Advance the clock by one inner step and the sends and landings that follow it.

    Args:
      clock: is updated in place.
      step: 1-based inner step; steps come in order.
      events: see `follow`.
      active, away: bool `[R]`, see `VirtualClock.inner_step`. A slow region's own pace is in the
        network's compute seconds: with equal seconds a region that steps more seldom stands idle.

    Raises:
      ValueError: see `follow`.
    """
    clock.inner_step(step, active, away, work)
    follow(clock, step, events)


def follow(clock: VirtualClock, step: int, events: Iterable[Any]) -> None:
    """Advance the clock by the sends and landings of one step.

    Regions that take no part in a send receive the result, too, as the exchange counts it. So do
    all others when one region's contribution travels alone (asynchronous arrivals). A region that
    lands a payload holds everything landed before, and waits for that.

    An event's bytes are those its codec announces.

    Args:
      clock: is updated in place.
      step: inner step after which they happened.
      events: each a `history.Event` of this step, in the order they happened.

    Raises:
      ValueError: an event has a route that the clock does not know.
    """
    for kind, group in itertools.groupby(events, key=lambda event: event.kind):
        if kind == "send":
            for event in group:
                _send(clock, step, event)
        elif kind == "route":
            for event in group:
                _route(clock, step, event)
        elif kind == "recover":
            for event in group:
                _recover(clock, step, event)
        else:
            _land(clock, step, group)


def replay(
    network: Network,
    rows: Iterable[Mapping[str, Any]],
    seed: int = 0,
    record_from: int | None = 1,
    clock: VirtualClock | None = None,
) -> VirtualClock:
    """The clock of a finished run, had it run on `network`.

    Args:
      rows: per-step records as `history.History.rows` gives them (`step`, `events`, `active` or
        `away` where not every region stepped, `work` where steps differ), in order, without gaps.
      seed: seed of the network's jitter.
      record_from: step from which on bars are kept for the timeline; None = never. Recording costs
        several times as much as the rest.
      clock: goes on with this one, which has followed the rows before; None = a new one.
    """
    if clock is None:
        clock = VirtualClock(network, seed=seed)

    for row in rows:
        if record_from is not None and row["step"] >= record_from and clock.recorder is None:
            clock.start_recording()
        events = [SimpleNamespace(**{**LEFT_OUT, **event}) for event in row["events"]]
        presence = {name: row[name] for name in ("active", "away", "work") if name in row}
        drive(clock, row["step"], events, **presence)
    return clock


def every_step(clock: VirtualClock, first: int, count: int, nbytes: float) -> None:
    """Advance by steps first, ..., first + count - 1 of the baseline (`BASELINE`).

    Args:
        clock: is updated in place.
        nbytes: payload bytes of each region.
    """
    for step in range(first, first + count):
        key = f"0@{step}"  # the engine's: it draws the same jitter
        clock.inner_step(step)
        clock.send(step, key, nbytes, "two_shot", label=0)
        clock.land(step, key)


# -- events ------------------------------------------------------------------------------------


def _send(clock: VirtualClock, step: int, event: Any) -> None:
    if event.route not in (*HEARD, "pair", "one_way"):
        raise ValueError(
            f"payload {event.key!r} of step {step} travels by {event.route!r}: the clock follows "
            f"{', '.join(HEARD)}, pair, one_way"
        )
    if event.route == "one_way":  # from one region to another; what each sends differs
        sizes = np.asarray(event.bytes_sent, float).tolist()
        clock.send(step, event.key, sizes, "pair", groups=event.groups, label=_label(event))
        return
    sends_R = np.asarray(event.participants, bool)
    clock.send(
        step,
        event.key,
        event.nbytes,
        event.route,
        participants_R=sends_R,
        groups=event.groups,
        listeners_R=~sends_R if event.groups is None else None,
        label=_label(event),
    )


def _route(clock: VirtualClock, step: int, event: Any) -> None:
    """Activations that regions pass on within a step: one transfer after the other.

    A tick needs the transfers of the one before, so that receivers wait. All of the step's
    computing is booked before its first transfer, which changes no sum.
    """
    for number, (ways, nbytes) in enumerate(event.hops):
        keys = [f"{ACTIVATIONS}{number}.{i}" for i in range(len(ways))]
        for key, way in zip(keys, ways, strict=True):
            rings = _rings(tuple(way))
            clock.send(step, key, nbytes, event.route, groups=rings, label=ACTIVATIONS)
        for key in keys:
            clock.land(step, key)


def _recover(clock: VirtualClock, step: int, event: Any) -> None:
    """A learner that comes back waits for a peer's state."""
    sent_R = np.asarray(event.bytes_sent, float)
    region, peer = int(np.flatnonzero(event.participants)[0]), int(np.argmax(sent_R))
    key = f"{RECOVERY}@{step}/{region}"
    clock.send(step, key, sent_R.tolist(), "pair", groups=[(peer, region)], label=RECOVERY)
    clock.land(step, key)


@functools.cache
def _rings(way: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The transfers r to way[r] as closed rings; a region with way[r] = r is in none."""
    found, left = [], {r for r, target in enumerate(way) if r != target}
    while left:
        ring = [min(left)]
        while (target := way[ring[-1]]) != ring[0]:
            ring.append(target)
        left -= set(ring)
        found.append(tuple(ring))
    return tuple(found)


def _land(clock: VirtualClock, step: int, events: Iterable[Any]) -> None:
    """All anchors move before anyone adopts one, so everyone waits for all that lands here."""
    adopting: set[int] = set()
    landed = list(events)
    for event in landed:
        regions = np.flatnonzero(event.participants).tolist()
        adopting.update(regions)
        ahead = _ahead(event)
        if ahead in clock.transit.payloads:
            clock.land(step, ahead)
        if event.key is not None:
            clock.land(step, event.key, regions)
    clock.catch_up(adopting)
    for event in landed:
        if event.ahead:
            # The moved anchors leave for the next partners: they travel while the regions compute.
            groups = event.groups
            clock.send(step, _ahead(event), event.ahead, "pair", groups=groups)


def _label(event: Any) -> Hashable:
    """Name under which the ledger books an event: channel or fragment, with its trainer if any."""
    if event.channel is not None:
        return event.channel
    return event.fragment if event.trainer is None else (event.trainer, event.fragment)


def _ahead(event: Any) -> str:
    """Key of the anchors that gossiping regions send ahead of the next round."""
    return f"{_label(event)}:anchors"
