"""Core-seconds of a cell: an estimate from its size, corrected by the recorded runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from evidence.campaign.cells import Cell
from evidence.campaign.ledger import Records

_SETUP_SECONDS = 3.0  # programs come from the cache mostly
_FLOPS_A_SECOND = 2.5e10  # of a core, at matrices of this size
_FLOPS_A_PARAMETER = 6.0  # and token: forward and backward


class RunEstimate:
    """Core-seconds by cell: set-up, and seconds a FLOP times the FLOPs of the run.

    Both are fitted to recorded runs: those of the same arm and size, else of the size, else of all.
    Runs of a single length give the set-up only; the pace is then that of one core by default.

    Args:
      backend: of JAX, where the cell would run; records of other backends tell nothing of it.
    """

    def __init__(self, ledger: Records, backend: str):
        self._campaign, self._backend = ledger.campaign, backend
        self._seen: dict[tuple[str, ...], list[tuple[float, float]]] = {}
        self.learn(ledger.found.values())

    def learn(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take the times of runs into account."""
        for record in records:
            if record["machine"]["backend"] == self._backend:
                cell = Cell(**record["cell"])
                for key in self._keys(cell):
                    seen = self._seen.setdefault(key, [])
                    seen.append((self.flops(cell), record["core_seconds"]))

    def seconds(self, cell: Cell) -> float:
        """Core-seconds that the cell will take."""
        seen = next((self._seen[key] for key in self._keys(cell) if key in self._seen), [])
        setup, pace = _line(seen)
        return setup + pace * self.flops(cell)

    def knows(self, cell: Cell) -> bool:
        """Whether a run of this size is recorded."""
        return (cell.size,) in self._seen

    @staticmethod
    def _keys(cell: Cell) -> tuple[tuple[str, ...], ...]:
        return (cell.size, cell.arm), (cell.size,), ()

    def flops(self, cell: Cell) -> float:
        """Of the training: 6 a parameter and token."""
        tokens = self._campaign.tokens(cell.size, cell.rounds)
        return tokens * self._campaign.sizes[cell.size].params * _FLOPS_A_PARAMETER


def _line(seen: list[tuple[float, float]]) -> tuple[float, float]:
    """Set-up in seconds and seconds a FLOP that fit best; neither is negative."""
    guess = 1 / _FLOPS_A_SECOND
    if not seen:
        return _SETUP_SECONDS, guess
    work, seconds = np.array(seen).T
    pace = guess
    if len(set(work)) > 1:
        pace = max(0.0, float(np.polyfit(work, seconds, 1)[0]))
    return max(0.0, float(np.mean(seconds - pace * work))), pace


Seconds = Callable[[Cell], float]
