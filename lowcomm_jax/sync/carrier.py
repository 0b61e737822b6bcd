"""`Carrier`: takes payloads to the other regions, for a loop that knows nothing of them.

`sync_loop.MeshCarrier` serves a program that holds all regions, `jobs.job_carrier` a job that is
one region of several. A carrier decides nothing about the method; what it cannot reach waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from lowcomm_jax.exchange import MeshExchange, Traffic
from lowcomm_jax.exchange.pairs import Draw
from lowcomm_jax.rules.topology import Groups
from lowcomm_jax.schedule.base import Stage
from lowcomm_jax.state.train_state import InFlight, TrainState

PyTree = Any


class Collected(NamedTuple):
    """What came of a send.

    Attributes:
      flight: with the payloads of all regions that exchanged it.
      draw: the groups that did, as the landing program takes them; None without gossip.
      times: metrics of its travel, `[1]` each.
      weights: float32 `[R]` each, of moves of the anchor that follow one another; None = one move,
        by the weights of `flight`.
    """

    flight: InFlight
    draw: Draw | None
    times: dict[str, np.ndarray]
    weights: tuple[np.ndarray, ...] | None = None


class Carrier(Protocol):
    """What a loop asks for; of a schedule by rounds also `RoundCarrier.agreed`.

    Attributes:
      paused: whether the newest step stands before a stage whose payloads are still waited for, so
        that its state can be saved. The step is done before the next one begins (`Engine.run`).
      header: numbers that travel with every payload, float32 `[R, n]` by name.
    """

    paused: bool
    header: Mapping[str, Any]

    def begins(self, loop: Any, state: TrainState) -> None:
        """A loop begins to do what is due up to the counters' step."""
        ...

    def reach(self, loop: Any, state: TrainState, stage: Stage, begun: bool) -> bool:
        """Block until a stage's payloads can be collected; False = the others are not reached, or
        the wait is `paused`.

        Args:
          begun: whether a stage of the counters' step is done already.
        """
        ...

    def post(
        self, loop: Any, state: TrainState, key: str, flight: InFlight, again: bool = False
    ) -> dict[str, np.ndarray]:
        """Take over a payload that was put in flight; returns at once, with metrics of the send.

        Args:
          again: whether an earlier job has sent it.
        """
        ...

    def collect(
        self, loop: Any, state: TrainState, key: str, last: bool, adopts: bool
    ) -> tuple[TrainState, Collected]:
        """The payloads of all regions that sent `key`.

        Args:
          last: whether it is the last synchronisation of a run.
          adopts: whether regions will adopt the resulting anchor.

        Returns:
          (state, what came).
        """
        ...

    def done(self, loop: Any, state: TrainState, in_time: bool) -> None:
        """Called when the acts of a step are done."""

    def traffic(
        self, exchange: MeshExchange, p: int, like: PyTree, mask: np.ndarray, groups, header: int
    ) -> Traffic:
        """Bytes of one exchange of fragment p, as announced at its send.

        With gossip those of anchors are among them that go with the payload.
        """
        ...

    def ahead(self, loop: Any, state: TrainState, p: int, groups: Groups) -> Traffic | None:
        """Send fragment p's moved anchors to the groups of its next round.

        Returns:
          The bytes; None = anchors go with the payloads of that round.
        """
        ...

    def ending(
        self, loop: Any, state: TrainState
    ) -> contextlib.AbstractContextManager[LastCarrier]:
        """Entered where a run ends, and nothing may be put off; gives the loop's carrier from then
        on, until the run has ended.

        Raises:
          ValueError: it cannot end here.
        """
        ...

    def reconnect(self, loop: Any, state: TrainState) -> None:
        """Take over the payloads that a restored state has in flight."""


class LastCarrier(Carrier, Protocol):
    """What the last synchronisation of a run also asks for."""

    def everyone_landed(self, state: TrainState, p: int, step: int, here: bool) -> bool:
        """Whether fragment p has landed everywhere at this step; `here`: whether it has here."""
        ...

    def ended_before(self, state: TrainState) -> bool:
        """Whether the others ended without the regions here: nothing is then left to send."""
        ...

    def close(self, loop: Any, state: TrainState) -> None:
        """Called when the last payload of the run has landed.

        Raises:
          exchange.Parted: another region's anchor is another.
        """
