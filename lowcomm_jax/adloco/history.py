"""What a `History` tells of several trainers: metrics over all of them, and rows with each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from lowcomm_jax.history import Event, History


@dataclasses.dataclass
class Told:
    """What steps and landings tell beside the state.

    Attributes:
      events: of all trainers; the key of each starts with its trainer's number.
      noise: trainer's number -> what decides on its next batch, `[n, 3]` as `pooled` takes it: of
        the regions that have measured and took part in the round; none where there is no such.
      looks: (step, trainer's number, the batch policy's statistics and its decision).
      merges: those before the next step.
    """

    events: list[Event] = dataclasses.field(default_factory=list)
    noise: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    looks: list[tuple[int, int, dict[str, Any]]] = dataclasses.field(default_factory=list)
    merges: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def add(self, number: int, events: Sequence[Event]) -> None:
        """Add a trainer's own events."""
        for event in events:
            key = None if event.key is None else f"{number}/{event.key}"
            self.events.append(dataclasses.replace(event, key=key, trainer=number))

    def hear(self, number: int, measured_Nx4: Any, took_part_N: np.ndarray) -> None:
        """Take the `Noise` that all regions have measured of a trainer; waits for it."""
        measured_Nx4 = np.asarray(measured_Nx4)
        counts_N = (measured_Nx4[:, 3] > 0) & took_part_N
        if counts_N.any():
            self.noise[number] = measured_Nx4[counts_N, :3]

    def in_order(self) -> list[Event]:
        """The events step by step; of several trainers, by number, all sends come first.

        They leave together and share the links; the order of one trainer's own stays.
        """
        several = len({event.trainer for event in self.events}) > 1
        return sorted(self.events, key=lambda e: (e.step, several and e.kind != "send", e.trainer))


@dataclasses.dataclass(frozen=True)
class OverTrainers:
    """A metric over trainers, `[R, S]`: the mean weighted by their tokens; of `tokens` the sum.

    It is fetched from the devices when NumPy makes an array of it.
    """

    histories: list[History]
    name: str

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # it is always a new one
        first, *others = self.histories
        if not others:
            return np.asarray(first[self.name].T, dtype)
        tokens_TxSxR = np.array([history["tokens"] for history in self.histories], float)
        total_SxR = tokens_TxSxR.sum(axis=0)
        if self.name == "tokens":
            return np.asarray(total_SxR.T, dtype)
        share_TxSxR = tokens_TxSxR / np.where(total_SxR > 0, total_SxR, 1)
        values_TxSxR = np.array([history[self.name] for history in self.histories], float)
        mean_SxR = (np.where(share_TxSxR > 0, values_TxSxR, 0) * share_TxSxR).sum(axis=0)
        return np.asarray(mean_SxR.T, dtype)
