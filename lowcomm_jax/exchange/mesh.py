"""Exchange inside one JAX program: collectives over the mesh's region axis.

For simulation on one machine, and for several slices in one `jax.distributed` job. A collective of
this backend is part of the landing program, so it is ordered with the inner steps on the device's
queue: delays are exact, but transfers do not overlap with compute in real time.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from lowcomm_jax.compression.sliced import Sliced
from lowcomm_jax.compression.staged import Staged
from lowcomm_jax.compression.two_shot import slices_of
from lowcomm_jax.exchange.traffic import Traffic, all_gather, pair, two_shot
from lowcomm_jax.regions import REGION, Regions
from lowcomm_jax.stages import STAGE
from lowcomm_jax.topology import Groups

PyTree = Any


@dataclasses.dataclass(frozen=True)
class MeshExchange:
    """Reduces payloads over the regions of a mesh.

    Attributes:
      regions: the regions and their mesh.
      codec: wire codec, or None for dense fp32.
    """

    regions: Regions
    codec: Any = None

    def at(self, level: int) -> MeshExchange:
        """The exchange of payloads encoded at this level of the codec."""
        codec = None if self.codec is None else self.codec.at(level)
        return MeshExchange(self.regions, codec)

    def mean(self, payload_R: PyTree, weight_R: jax.Array, like: PyTree, specs: PyTree) -> PyTree:
        """Weighted mean of what the payloads decode to; fp32 leaves `[1, ...]` (traced).

        Dense payloads are reduced slice by slice; coded ones are handed to everyone, decoded, and
        added in region order, or reduced slice by slice and encoded a second time.
        """
        if self.codec is None:
            return self.regions.mean(payload_R, weight_R, specs)
        if self.slices is not None:
            mean = self._two_shot(payload_R, weight_R, like)
        else:
            mean = self.codec.aggregate(self.regions.gather(payload_R, self.lead), weight_R, like)
        return jax.tree.map(lambda x: x[None], mean)

    @property
    def lead(self) -> P:
        """Where the leading axes of payloads and codec states lie."""
        return P(REGION, STAGE) if isinstance(self.codec, Staged) else P(REGION)

    @property
    def slices(self) -> Sliced | None:
        """The codec in slices, where payloads are reduced two-shot."""
        return slices_of(self.codec)

    def _two_shot(self, payload_R: PyTree, weight_R: jax.Array, like: PyTree) -> PyTree:
        """Region r averages slice r of everyone's payload, and hands the coded mean to all."""
        again, one_slice = self.slices.codec, self.slices.slice_like(like)

        def reduce_slice(slice_R, weight_R):
            mean = again.aggregate(slice_R, weight_R, one_slice)
            return again.encode(mean, ())[0]

        own_slice_R = self.regions.deal(payload_R)
        reduced_R = self.regions.lift(reduce_slice, (0, None))(own_slice_R, weight_R)
        return self.slices.decode(self.regions.gather(reduced_R), like)

    def nbytes(self, like: PyTree) -> int:
        """Bytes of one region's payload for a fragment of these shapes."""
        if self.codec is None:
            return 4 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(like))
        return self.codec.nbytes(like)

    def traffic(
        self,
        like: PyTree,
        takes_part_R: np.ndarray,
        groups: Groups | None = None,
        header: int = 0,
    ) -> Traffic:
        """Bytes between regions of one reduction of a fragment and of `header` bytes with it.

        `groups` None = one of all regions.
        """
        nbytes = self.nbytes(like) + header
        if groups is not None:
            return pair(nbytes, takes_part_R, groups)
        sliced = self.codec is None or self.slices is not None
        return (two_shot if sliced else all_gather)(nbytes, takes_part_R)
