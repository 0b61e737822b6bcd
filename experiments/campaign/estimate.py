"""Core-seconds of a cell: a guess from its size, corrected by the runs that are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from experiments.campaign.cells import Cell
from experiments.campaign.plan import Campaign

_SETUP_SECONDS = 3.0  # programs come from the cache mostly
_FLOPS_A_SECOND = 2.5e10  # of a core, at matrices of this size
_FLOPS_A_PARAMETER = 6.0  # and token: forward and backward


class Estimate:
    """Core-seconds by cell.

    The guess is set-up and 6 FLOPs a parameter and token at a pace of one core. It is scaled by the
    median ratio of what runs took: those of the same arm and size, else of the size, else all.
    """

    def __init__(self, campaign: Campaign, records: Iterable[Mapping[str, Any]] = ()):
        self._campaign = campaign
        self._ratios: dict[tuple[str, ...], list[float]] = {}
        for record in records:
            self.learn(record)

    def learn(self, record: Mapping[str, Any]) -> None:
        """Take the time of a run into account."""
        cell = Cell(**record["cell"])
        ratio = record["core_seconds"] / self._guess(cell)
        for key in self._keys(cell):
            self._ratios.setdefault(key, []).append(ratio)

    def seconds(self, cell: Cell) -> float:
        """Core-seconds that the cell will take."""
        for key in self._keys(cell):
            if key in self._ratios:
                return self._guess(cell) * float(np.median(self._ratios[key]))
        return self._guess(cell)

    def total(self, cells: Iterable[Cell]) -> float:
        return sum(map(self.seconds, cells))

    @staticmethod
    def _keys(cell: Cell) -> tuple[tuple[str, ...], ...]:
        return (cell.size, cell.arm), (cell.size,), ()

    def _guess(self, cell: Cell) -> float:
        campaign, size = self._campaign, self._campaign.sizes[cell.size]
        seq_len = {**campaign.common, **size.fields}.get("data", {}).get("seq_len", 128)
        tokens = cell.rounds * campaign.period * size.batch * seq_len
        return _SETUP_SECONDS + tokens * size.params * _FLOPS_A_PARAMETER / _FLOPS_A_SECOND


Seconds = Callable[[Cell], float]
