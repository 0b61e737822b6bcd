"""`JobTraffic`: the bytes that a job which is one region of several announces for an exchange."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from lowcomm_jax.exchange import MeshExchange, Traffic, all_gather, in_halves, pair
from lowcomm_jax.rounds.slicing import goes_in_slices, padded_nbytes
from lowcomm_jax.rules.topology import Groups

PyTree = Any


@dataclasses.dataclass(frozen=True)
class JobTraffic:
    """Bytes of one region, `[1]`; takes all other regions to take part.

    Attributes:
      total: number of regions.
      region: number of this one, from 0.
      whole: every region needs the payloads of all, and not only their mean.
    """

    total: int
    region: int
    whole: bool = False

    def in_slices(self, exchange: MeshExchange) -> bool:
        """Whether each region averages one slice, where all exchange."""
        return not self.whole and goes_in_slices(exchange, self.total)

    def of_payloads(
        self,
        exchange: MeshExchange,
        like: PyTree,
        mask: np.ndarray,
        groups: Groups | None,
        header: int,
    ) -> Traffic:
        """One exchange of payloads without anchors; arguments as of `MeshExchange.traffic`."""
        nbytes, everyone = exchange.nbytes(like) + header, self._with_others(mask)
        if groups is not None:
            return self._own(pair(nbytes, everyone, groups))
        if self.in_slices(exchange):
            padded = padded_nbytes(exchange, like, self.total)
            return self._own(in_halves(padded, everyone).plus(all_gather(header, everyone)))
        return self.of_all(nbytes, mask)

    def of_all(self, nbytes: int, mask: np.ndarray) -> Traffic:
        """Where every region gets all payloads, of `nbytes` bytes each, whole."""
        return self._own(all_gather(nbytes, self._with_others(mask)))

    def of_anchors(self, like: PyTree, mask: np.ndarray, groups: Groups) -> Traffic:
        """The anchors of one round."""
        nbytes = 4 * sum(x.size for x in jax.tree.leaves(like))
        return self._own(pair(nbytes, self._with_others(mask), groups))

    def _with_others(self, mask: np.ndarray) -> np.ndarray:
        """Bool `[R]`: this region as in `mask`, and all others."""
        everyone = np.ones(self.total, bool)
        everyone[self.region] = mask.any()
        return everyone

    def _own(self, traffic: Traffic) -> Traffic:
        own = slice(self.region, self.region + 1)
        return traffic._replace(sent=traffic.sent[own], received=traffic.received[own])
