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

from lowcomm_jax.exchange.traffic import Traffic, all_gather, pair, two_shot
from lowcomm_jax.regions import Regions
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

    def mean(self, payload_R: PyTree, weight_R: jax.Array, like: PyTree, specs: PyTree) -> PyTree:
        """Weighted mean of what the payloads decode to; fp32 leaves `[1, ...]` (traced).

        Dense payloads are reduced slice by slice; coded ones are handed to everyone, decoded, and
        added in region order.
        """
        if self.codec is None:
            return self.regions.mean(payload_R, weight_R, specs)
        everywhere = self.regions.gather(payload_R)
        mean = self.codec.aggregate(everywhere, weight_R, like)
        return jax.tree.map(lambda x: x[None], mean)

    def nbytes(self, like: PyTree) -> int:
        """Bytes of one region's payload for a fragment of these shapes."""
        if self.codec is None:
            return 4 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(like))
        return self.codec.nbytes(like)

    def traffic(
        self, like: PyTree, takes_part_R: np.ndarray, groups: Groups | None = None
    ) -> Traffic:
        """Bytes between regions of one reduction of a fragment; `groups` None = one of all."""
        if groups is not None:
            return pair(self.nbytes(like), takes_part_R, groups)
        route = two_shot if self.codec is None else all_gather
        return route(self.nbytes(like), takes_part_R)
