"""How a round trip's payloads reach the other regions: on one mesh, or between jobs.

On the mesh all regions are in one program and nothing needs carrying: the landing program reads
every region's rows. Between jobs, `jobs.BetweenJobs` hands a payload to an exchange at the send and
waits for everybody's, or for what they were reduced to, at the landing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from lowcomm_jax.exchange import GroupExchange, MeshExchange, Traffic, pair
from lowcomm_jax.exchange.pairs import Draw
from lowcomm_jax.fragments import Fragments
from lowcomm_jax.state import InFlight, TrainState
from lowcomm_jax.topology import Groups

PyTree = Any


class Carrier(Protocol):
    """Carries the payloads of one engine.

    Attributes:
      total: number of regions of the run; a state holds the rows of those that are in this job.
      always: whether a region that sits out must say so, since the others wait for its word.
      insists: wait for the others also where they cannot be reached.
      trained: inner steps that this job has made.
    """

    total: int
    always: bool
    insists: bool
    trained: int

    def before(self, codec_state: PyTree) -> PyTree:
        """`InFlight.kept` of what is encoded next."""

    def start(
        self,
        key: str,
        number: int,
        flight: InFlight,
        anchor: dict[str, Any],
        groups: Groups | None,
        exchange: MeshExchange,
        fragments: Fragments,
        again: bool = False,
    ) -> None:
        """Send off a payload; returns at once.

        Args:
          key: `state.flight_key`; may come twice (`finish`).
          number: of the run's sends so far, this one included.
          flight: nothing of it is donated before it lands.
          anchor: of all fragments, `[A, ...]`, at the send.
          groups: who exchanges with whom; None = all regions.
          exchange: that of the payload's level; fragments: of the model.
          again: it was sent before; the anchor may have moved since.
        """

    def reachable(self) -> bool:
        """Whether the other regions can be reached, as far as is known."""

    def be_patient(self, seconds: float) -> None:
        """Wait so much longer than usual for the others, in what is sent from now on."""

    def arrives(self, state: TrainState, keys: Sequence[str]) -> bool:
        """Wait until `finish` need not, for any of these; False = the others cannot be reached."""

    def hears(self, key: str) -> bool:
        """Whether this job will know who was counted; not of other regions' groups."""

    def finish(self, state: TrainState, key: str) -> tuple[TrainState, InFlight]:
        """Wait for everyone's payload.

        Returns:
          (state, flight): the flight with the rows of all who exchange it, or with what their
          payloads were reduced to (`exchange.InSlices`); in the state, it says whether the regions
          of this job were counted.
        """

    def times(self, key: str | None) -> dict[str, np.ndarray]:
        """By real clocks, of a payload that has landed, float32 `[1]`; empty on a mesh.

        `travel_seconds`: from being computed to everyone's being here; `waited_seconds`: of these,
        how long this job stood still for it.
        """

    def settled(self, state: TrainState, fragments: Fragments) -> None:
        """A step with sends or landings is over."""

    def still_behind(self) -> None:
        """What is due at a step is put off, and training goes on."""

    def ended(self, state: TrainState, fragments: Fragments) -> None:
        """The last of all sends has landed.

        Raises:
          exchange.Parted: another region's anchor is another.
        """

    def draw(self, groups: GroupExchange, number: int, key: str) -> Draw:
        """What the landing program must know of the groups of a fragment's round `number`."""

    def anchors_ahead(self, nbytes: int, groups: Groups) -> Traffic:
        """Bytes of moved anchors on their way to the next groups, in the regions of this job."""

    def traffic(
        self,
        exchange: MeshExchange,
        like: PyTree,
        mask: np.ndarray,
        groups: Groups | None,
        header: int,
    ) -> Traffic:
        """Bytes of an exchange in the regions of this job; as `MeshExchange.traffic`."""


class OnMesh:
    """All regions are in this job: see `Carrier`."""

    always = False

    def __init__(self, total: int):
        self.total, self.insists, self.trained = total, False, 0

    def before(self, codec_state: PyTree) -> PyTree:
        del codec_state
        return None

    def start(self, key, number, flight, anchor, groups, exchange, fragments, again=False) -> None:
        """The landing program does it all."""

    def reachable(self) -> bool:
        return True

    def be_patient(self, seconds: float) -> None:
        """Nobody is waited for."""

    def arrives(self, state, keys) -> bool:
        return True

    def hears(self, key: str) -> bool:
        return True

    def finish(self, state, key) -> tuple[TrainState, InFlight]:
        return state, state.in_flight[key]

    def times(self, key: str | None) -> dict[str, np.ndarray]:
        del key
        return {}

    def settled(self, state: TrainState, fragments: Fragments) -> None:
        """Nobody else needs to hear of it."""

    def still_behind(self) -> None:
        """Nothing is put off."""

    def ended(self, state: TrainState, fragments: Fragments) -> None:
        """There is one copy."""

    def draw(self, groups: GroupExchange, number: int, key: str) -> Draw:
        del key
        return Draw(groups.draw(number))

    def anchors_ahead(self, nbytes: int, groups: Groups) -> Traffic:
        return pair(nbytes, np.ones(self.total, bool), groups)

    def traffic(self, exchange, like, mask, groups, header) -> Traffic:
        return exchange.traffic(like, mask, groups, header)
