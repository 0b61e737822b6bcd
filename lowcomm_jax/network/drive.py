"""Couple the virtual clock to real training: the engine's events, in virtual time.

Learning never waits for the clock and never looks at it, so a finished run can be replayed on any
network from its metrics alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from lowcomm_jax.network.clock import VirtualClock
from lowcomm_jax.network.links import Network

# Routes as the exchange names them, and the clock's collective of the same traffic.
ROUTES = {"two_shot": "two_shot", "all_gather": "gather", "pair": "pair"}
NO_GROUPS = {"groups": None, "ahead": 0}  # in records written before there was gossip

ONE_BY_ONE = (
    "arrivals of one region at a time (async_local_sgd) are not modelled by the virtual clock: "
    "leave the network out"
)


def drive(clock: VirtualClock, step: int, events: Iterable[Any], active=None) -> None:
    """Advance the clock by one inner step and the sends and landings that follow it.

    Args:
      clock: is updated in place.
      step: 1-based inner step; steps come in order.
      events: `history.Event`s of this step, in the order they happened.
      active: bool `[R]`, regions that made an inner step; None = all.

    Raises:
      ValueError: a contribution travels alone (asynchronous arrivals).
    """
    clock.inner_step(step, active)
    for event in events:
        if event.kind == "send":
            if "/" in event.key:
                raise ValueError(ONE_BY_ONE)
            route, who = ROUTES[event.route], event.participants
            clock.send(step, event.key, event.nbytes, route, who, event.groups)
        elif event.key is not None:
            _land(clock, step, event)


def _land(clock: VirtualClock, step: int, event: Any) -> None:
    """Wait for a payload; with gossip also for the anchors sent ahead after the last landing.

    Then the moved anchors leave for the next partners: they travel while the regions compute.
    """
    ahead = f"{event.fragment}:anchors"
    if ahead in clock.flights:
        clock.land(step, ahead)
    clock.land(step, event.key, [r for r, lands in enumerate(event.participants) if lands])
    if event.ahead:
        clock.send(step, ahead, event.ahead, "pair", groups=event.groups)


def replay(network: Network, rows: Iterable[Mapping[str, Any]], seed: int = 0) -> VirtualClock:
    """The clock of a finished run, had it run on `network`.

    Args:
      rows: per-step records as `history.History.rows` gives them (`step`, `events`), in order.
      seed: seed of the network's jitter.
    """
    clock = VirtualClock(network, seed=seed, record=True)
    for row in rows:
        events = [SimpleNamespace(**{**NO_GROUPS, **event}) for event in row["events"]]
        drive(clock, row["step"], events, row.get("active"))
    return clock
