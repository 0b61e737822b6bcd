"""`Carrier`: takes payloads to the other regions, for a loop that knows nothing of them.

`sync_loop.MeshCarrier` serves a program that holds all regions, `runtime.job_carrier` a job that is
one region of several. A carrier decides nothing about the method; what it cannot reach waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from lowcomm_jax.exchange import MeshExchange, Traffic
from lowcomm_jax.exchange.pairs import Draw, GroupExchange
from lowcomm_jax.rules.topology import Groups
from lowcomm_jax.schedule.base import Move, Stage
from lowcomm_jax.state.train_state import InFlight, TrainState

PyTree = Any


class Carrier(Protocol):
    """What a loop asks for.

    Attributes:
      separate: whether this job is one region of several.
      sends_empty: whether an absence is told to the others.
    """

    separate: bool
    sends_empty: bool

    def running(self, loop: Any, state: TrainState) -> contextlib.AbstractContextManager:
        """Entered while a loop does what is due up to the counters' step."""
        ...

    def comes_to(self, loop: Any, state: TrainState, step: int) -> None:
        """Called before the acts of a step, with the state of the newest step."""

    def reach(self, state: TrainState, stage: Stage) -> bool:
        """Block until a stage's payloads can be collected; False = the others are not reached."""
        ...

    def post(
        self, loop: Any, state: TrainState, key: str, flight: InFlight, again: bool = False
    ) -> None:
        """Take over a payload that was put in flight; returns at once."""

    def kept(self, codec_state: PyTree) -> PyTree:
        """A copy of a codec's state, where the others may leave a payload out; else None."""
        ...

    def collect(
        self, loop: Any, state: TrainState, key: str, last: bool, adopts: bool
    ) -> tuple[TrainState, InFlight]:
        """The payloads of all regions that sent `key`.

        Args:
          last: whether it is the last synchronisation of a run.
          adopts: whether regions will adopt the resulting anchor.

        Returns:
          (state, the flight with everyone's payloads).
        """
        ...

    def counted(self, flight: InFlight) -> np.ndarray | None:
        """Bool `[R]`: whose payloads count, of the regions here; None = as weights say."""
        ...

    def done(self, loop: Any, state: TrainState, in_time: bool) -> None:
        """Called when the acts of a step are done."""

    def header(self) -> dict[str, Any]:
        """Numbers that travel with every payload, float32 `[R, ...]` by name."""
        ...

    def times(self, key: str | None) -> dict[str, np.ndarray]:
        """Metrics of a payload that has landed."""
        ...

    def traffic(
        self, exchange: MeshExchange, like: PyTree, mask: np.ndarray, groups, header: int
    ) -> Traffic:
        """Bytes of one exchange without anchors, as announced at its send."""
        ...

    def with_anchors(
        self, traffic: Traffic, p: int, like: PyTree, mask: np.ndarray, groups: Groups
    ) -> Traffic:
        """The bytes with those of anchors that go with a payload (gossip)."""
        ...

    def draw(self, groups: GroupExchange, state: TrainState, flight: InFlight) -> Draw:
        """The groups that exchanged this payload, as the landing program takes them."""
        ...

    def ahead(self, loop: Any, state: TrainState, p: int, groups: Groups) -> Traffic:
        """Send fragment p's moved anchors to the groups of its next round; returns the bytes."""
        ...

    def patiently(self) -> contextlib.AbstractContextManager:
        """Entered where nothing may be put off: at the end of a run."""
        ...

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


def keys_to_collect(stage: Stage) -> Sequence[str]:
    """Keys of the payloads that move an anchor in a stage."""
    return [act.key for act in stage if isinstance(act, Move) and act.key is not None]
