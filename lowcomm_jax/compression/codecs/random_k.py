"""One random value of every s, chosen by a seed that travels instead of indices.

A matrix is cut into groups of s = `one_in` values; each group sends one of them, drawn anew every
round. The seed of the round is eight bytes of the payload, so that a region that missed rounds is
still decoded rightly. Regions that took part in the same rounds choose the same entries.

Error: that of `values` for a value that is sent, the value itself for the others.

Differs from textbook random-k: the choice is stratified (one per group), which needs no permutation
and spreads evenly; every value is still sent with probability 1 / s.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from lowcomm_jax.compression.codecs.cast import FP32
from lowcomm_jax.compression.grid import Shape, Unit
from lowcomm_jax.compression.leaf import InUnits, LeafCodec, taken
from lowcomm_jax.compression.means import PyTree
from lowcomm_jax.compression.placement import Placement
from lowcomm_jax.compression.units import UnitCodec, not_of_units
from lowcomm_jax.refused import at_least, refuse

_GROUPS = 256  # of a unit whose chosen values are coded together


@dataclasses.dataclass(frozen=True)
class RandomK(LeafCodec):
    """Send a random 1 / `one_in` of the values, coded with `values`.

    Attributes:
      one_in: s, size of a group. 1 sends everything.
      values: codec of the chosen values: units of up to 256 groups.
      unbiased: multiply decoded values by s, so that the expectation is the input. Off by default:
        error feedback wants the plain projection.

    Raises:
      ValueError: one_in below 1.
    """

    one_in: int = 64
    values: UnitCodec = FP32
    unbiased: bool = False
    layers_apart = False

    def __post_init__(self) -> None:
        wrong = [at_least("one_in", self.one_in, 1), not_of_units("values", self.values)]
        refuse("RandomK", wrong)

    @property
    def name(self) -> str:
        values = "" if self.values == FP32 else f"_{self.values.name}"
        return f"random_1in{self.one_in}{values}"

    def unit_of(self, matrices: Shape) -> Unit:
        _, n, m = matrices
        groups = -(-n * m // self.one_in)
        together = 1
        if self.values != FP32:
            together = -(-groups // max(-(-groups // _GROUPS), 1))
        return Unit(1, self.one_in * together, "joined")

    def in_shares(self, matrices: Shape) -> bool:
        return True

    def init(self, place: Placement, seed: int) -> PyTree:
        return {"key": jnp.asarray(np.array([seed % 2**32, 0], np.uint32))}

    def state_specs(self, place: Placement) -> PyTree:
        return {"key": P()}

    def _chosen(self, key: jax.Array, place: Placement, layers: int) -> jax.Array:
        """Which value of each group is chosen: bool `[l, 1, across, groups, s]`, a device's own."""
        grid, groups, shares = place.grid, -(-place.grid.width // self.one_in), place.shares
        axes = place.axes[2] if shares is None else shares.axes
        across = grid.across // place.devices(axes) if shares is None else shares.each
        column = jax.lax.axis_index(axes) * across if axes else 0

        def numbers(start, count):
            return jnp.uint32(start) + jnp.arange(count, dtype=jnp.uint32)

        unit = numbers(place.first_layer, layers)[:, None] * jnp.uint32(grid.across)
        unit = unit + numbers(column, across)[None]
        group = unit[..., None] * jnp.uint32(groups) + numbers(0, groups)[None, None]
        rng = jax.random.fold_in(jax.random.key(key[0]), key[1])
        keys = jax.vmap(lambda number: jax.random.fold_in(rng, number))(group.reshape(-1))
        at = jax.random.key_data(keys)[:, 0] % jnp.uint32(self.one_in)
        at = at.reshape(layers, 1, across, groups, 1)
        return at == jnp.arange(self.one_in, dtype=jnp.uint32).reshape(1, 1, 1, 1, -1)

    def _groups(self, units: jax.Array) -> jax.Array:
        """`[l, 1, across, 1, width]` -> `[l, 1, across, groups, s]`, zeros in the last group."""
        x = units[..., 0, :]
        missing = -x.shape[-1] % self.one_in
        x = jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, missing),)) if missing else x
        return x.reshape(*x.shape[:3], -1, self.one_in)

    def encode(
        self, x: jax.Array, state: PyTree, place: Placement, params: jax.Array | None = None
    ) -> tuple[PyTree, PyTree]:
        key, matrix = state["key"], place.matrix()
        units = matrix.filled(place.to_units(x))
        chosen = self._chosen(key, place, x.shape[0])
        kept = jnp.sum(jnp.where(chosen, self._groups(units), 0.0), axis=-1)
        kept, values = kept[..., None, :], InUnits(self.values)
        payload = {"key": key, **values.code_whole(kept, matrix.unpadded, place, self)}
        return payload, {"key": key + jnp.array([0, 1], jnp.uint32)}

    def decode(self, payload: PyTree, place: Placement) -> jax.Array:
        coded = taken({name: x for name, x in payload.items() if name != "key"}, place.shares)
        groups = -(-place.grid.width // self.one_in)
        kept = self.values.decode(coded, (1, groups))[..., 0, :, None]
        kept = kept * float(self.one_in) if self.unbiased else kept
        chosen = self._chosen(payload["key"], place, kept.shape[0])
        x = jnp.where(chosen, kept, 0.0)
        x = x.reshape(*x.shape[:3], 1, -1)[..., : place.grid.width]
        return place.from_units(x)

    def payload_specs(self, place: Placement) -> PyTree:
        like = self.payload_like(place)
        return {
            name: P() if name == "key" else place.array_spec(x.shape) for name, x in like.items()
        }


NAMES = {"random_k": RandomK()}
