"""Exchanges payloads of all regions inside one JAX program, over the mesh's region axis.

In: every region's pseudo-gradient of one fragment (`MeshExchange.encode`), then the payloads and
the weights of a round (`reduce`). Out: the weighted mean, and the bytes announced for it
(`traffic`).

It serves simulations on one machine, and several slices in one `jax.distributed` job. Its
collectives are part of the anchor update, and the device waits for them. Or they run beside the
inner steps of a payload's delay (`begin`, `go_on`; `sync.concurrent_exchange` makes that program),
and `reduce` takes their results.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from lowcomm_jax.compression.row_sharding import axes_inside
from lowcomm_jax.compression.staged import Staged
from lowcomm_jax.compression.two_shot import Sliced, slices_of
from lowcomm_jax.exchange import shares
from lowcomm_jax.exchange.rows import Rows
from lowcomm_jax.exchange.shares import Packing
from lowcomm_jax.exchange.traffic import Traffic, all_gather, pair, two_shot
from lowcomm_jax.mesh.regions import Regions, mean_scale
from lowcomm_jax.rules.topology import Groups

PyTree = Any


class Reduced(NamedTuple):
    """The reduction of all regions' payloads.

    Attributes:
      mean: fp32 leaves `[1, ...]`.
      rank: measured rank of the mean (`Codec.mean_rank`), or None.
    """

    mean: PyTree
    rank: jax.Array | None


class InSlices(NamedTuple):
    """Payloads that separate jobs reduced slice by slice before the landing (`rounds.slicing`).

    Attributes:
      tree: dense, leaves `[...]` of the weighted sum; coded, all slices `[parts, ...]` of the
        mean.
    """

    tree: PyTree


@dataclasses.dataclass(frozen=True)
class MeshExchange:
    """Reduces payloads over the regions of a mesh.

    Attributes:
      regions: the regions and their mesh.
      codec: wire codec, or None for dense fp32.
      stacked: path prefixes of leaves with a leading layer axis.
      one_by_one: whether a merge rule reads the payloads one by one, so that all of them go to
        everyone (`everyone`).
    """

    regions: Regions
    codec: Any = None
    stacked: tuple[str, ...] = ()
    one_by_one: bool = False

    def at(self, level: int) -> MeshExchange:
        """The exchange of payloads encoded at this level of the codec."""
        codec = None if self.codec is None else self.codec.at(level)
        return dataclasses.replace(self, codec=codec)

    @property
    def rows(self) -> Rows:
        """Where leaves lie while they are coded."""
        return Rows(self.regions, self.codec, self.stacked)

    def encode(
        self,
        delta_R: PyTree,
        state_R: PyTree,
        specs: PyTree,
        accepted_R: jax.Array | None = None,
    ) -> tuple[PyTree, PyTree]:
        """Every region's payload and new codec state (traced), coded where the rows lie.

        Args:
          delta_R: fp32 leaves `[R, ...]`; state_R: codec states `[R, ...]`.
          specs: `PartitionSpec` of each leaf inside a region.
          accepted_R: bool `[R]`; where it is False the state stays as it was. None = all True.
        """
        return self._encode(delta_R, state_R, specs, accepted_R, measure=False)[:2]

    def encode_and_measure(
        self,
        delta_R: PyTree,
        state_R: PyTree,
        specs: PyTree,
        accepted_R: jax.Array | None = None,
    ) -> tuple[PyTree, PyTree, jax.Array]:
        """As `encode`, and ||decoded - delta|| of every region, fp32 `[R]`.

        The norm is taken where the rows lie, so that nothing but sums moves for it.
        """
        return self._encode(delta_R, state_R, specs, accepted_R, measure=True)

    def _encode(self, delta_R, state_R, specs, accepted_R, measure: bool):
        rows, like = self.rows, without_lead(delta_R)
        by_rows, codec = rows.to_rows(delta_R, specs), rows.codec_with_layout(like, specs)

        def encode(delta, state, accepted=None):
            if accepted is None:
                payload, new_state = codec.encode(delta, state)
            else:
                payload, new_state = codec.encode_if(accepted, delta, state)
            if not measure:
                return payload, new_state, None
            missed = jax.tree.map(jnp.subtract, codec.decode(payload, delta), delta)
            return payload, new_state, optax.tree.norm(missed)

        given = (by_rows, state_R) + (() if accepted_R is None else (accepted_R,))
        payload_R, new_state_R, missed_R = self.regions.lift(encode, (0,) * len(given))(*given)
        lies = rows.state_specs(without_lead(state_R), like, specs)
        placed = rows.place(payload_R, self._payload_specs(payload_R, like, specs))
        return placed, rows.place(new_state_R, lies), missed_R

    def decode(self, payload_R: PyTree, like: PyTree, specs: PyTree) -> PyTree:
        """Every region's decoded payload, fp32 `[R, ...]` (traced); see `encode`."""
        codec = self.rows.codec_with_layout(like, specs)

        def decode(payload):
            return codec.decode(payload, like)

        return self.rows.from_rows(self.regions.lift(decode, (0,))(payload_R), specs)

    def _lies(self, payload_R: PyTree, like: PyTree, specs: PyTree) -> PyTree:
        """`PartitionSpec` of each leaf of a payload inside a region, coded or dense."""
        return specs if self.codec is None else self._payload_specs(payload_R, like, specs)

    def _payload_specs(self, payload_R: PyTree, like: PyTree, specs: PyTree) -> PyTree:
        if self.slices is None:
            return self.rows.payload_specs(payload_R, like, specs)
        found = self.rows.payload_specs(payload_R, like, specs, lead=2)
        return jax.tree.map(lambda spec: P(None, *spec), found)

    def mean(self, payload_R: PyTree, weight_R: jax.Array, like: PyTree, specs: PyTree) -> PyTree:
        """The mean of `reduce` alone."""
        return self.reduce(payload_R, weight_R, like, specs).mean

    def reduce(
        self,
        payload_R: PyTree,
        weight_R: jax.Array,
        like: PyTree,
        specs: PyTree,
        energy: float | None = None,
        brought: Sequence[jax.Array] | None = None,
    ) -> Reduced:
        """Weighted mean of the decoded payloads; fp32 leaves `[1, ...]` (traced).

        Dense payloads are reduced slice by slice. Encoded ones are sent to every region, decoded,
        and added in region order; or reduced slice by slice and encoded a second time.

        Args:
          payload_R: leaves `[R, ...]`, or `InSlices`.
          energy: of the rank to measure (`Codec.mean_rank`); None = do not measure it.
          brought: result of the last of the `collectives`; of `payload_R` only the shapes are then
            used. None = the collectives run here.
        """
        if self.codec is None:
            mean = self._dense_mean(payload_R, weight_R, specs, brought)
            return Reduced(mean, None)
        if self.slices is not None:
            found = Reduced(self._two_shot(payload_R, weight_R, like, specs, brought), None)
        else:
            found = self._one_shot(payload_R, weight_R, like, specs, energy, brought)
        mean = jax.tree.map(lambda x: x[None], found.mean)
        return found._replace(mean=self.rows.from_rows(mean, specs, lead=None))

    def _dense_mean(self, payload_R, weight_R, specs, brought) -> PyTree:
        # Multiplied in this program, as `Regions.mean` does: it may become part of a fused
        # multiply-add with what follows, and must then be in every job, too.
        if isinstance(payload_R, InSlices):
            scale = mean_scale(weight_R)
            return jax.tree.map(lambda x: x[None] * scale, payload_R.tree)
        if brought is not None:
            scale = mean_scale(weight_R)
            sums = shares.join_buffers(self.regions, brought)
            found = self._dense_packing(payload_R, specs).unpack(sums, (None,))
            return jax.tree.map(lambda x: x * scale, found)
        return self.regions.mean(payload_R, weight_R, specs)

    def _one_shot(self, payload_R, weight_R, like, specs, energy, brought) -> Reduced:
        """Every region decodes everyone's payload."""
        codec = self.rows.codec_with_layout(like, specs)
        by_rows = self._pinned_by_rows(like, specs)

        def aggregate(payload_R, weight_R):
            given = (payload_R, weight_R, like)
            rank = None if energy is None else codec.mean_rank(*given, energy)
            return Reduced(by_rows(codec.aggregate(*given)), rank)

        everyone = self._gathered(payload_R, self._lies(payload_R, like, specs), brought)
        return self.regions.everywhere(aggregate)(everyone, weight_R)

    def _gathered(self, tree_R, lies, brought) -> PyTree:
        """Every region's tree in all regions: `[R, ...]`, gathered here or as it was brought."""
        if brought is None:
            return shares.gather(self.regions, tree_R, lies)
        return Packing(self.regions, tree_R, lies, merged=True).unpack(brought, (None,))

    def everyone(
        self,
        payload_R: PyTree,
        like: PyTree,
        specs: PyTree,
        brought: Sequence[jax.Array] | None = None,
    ) -> PyTree:
        """The decoded payloads of all regions, in every region: fp32 `[R, ...]` (traced).

        Args: as in `reduce`.
        """
        payload_R = self._gathered(payload_R, self._lies(payload_R, like, specs), brought)
        if self.codec is None:
            return jax.tree.map(lambda x: x.astype(jnp.float32), payload_R)
        codec = self.rows.codec_with_layout(like, specs)
        by_rows = self._pinned_by_rows(like, specs)

        def decode(payload_R):
            decoded_R = jax.lax.map(lambda payload: codec.decode(payload, like), payload_R)
            return jax.vmap(by_rows)(decoded_R)

        decoded_R = self.regions.everywhere(decode)(payload_R)
        return self.rows.from_rows(decoded_R, specs, lead=None)

    # -- the collectives one by one, for who lets other work run beside them ----------------------

    @property
    def collectives(self) -> int:
        """Number of collectives that a reduction does one after the other."""
        if self.regions.slots == 1:
            return 0
        return 2 if self._by_slices else 1

    def begin(self, payload_R: PyTree, like: PyTree, specs: PyTree) -> list[jax.Array]:
        """Pack the payloads, and do the first of the `collectives`: its buffers (traced)."""
        if not self._by_slices:
            lies = self._lies(payload_R, like, specs)
            packing = Packing(self.regions, payload_R, lies, merged=True)
            return shares.gather_buffers(self.regions, packing.pack(payload_R))
        if self.codec is None:
            fp32 = jax.tree.map(lambda x: x.astype(jnp.float32), payload_R)
            buffers = self._dense_packing(fp32, specs).pack(fp32)
            return shares.swap_buffers(self.regions, shares.cut_buffers(self.regions, buffers))
        buffers = self._packing_of_slices(payload_R, like, specs).pack(payload_R)
        return shares.swap_buffers(self.regions, buffers)

    def go_on(
        self,
        buffers: Sequence[jax.Array],
        payload_R: PyTree,
        weight_R: jax.Array,
        like: PyTree,
        specs: PyTree,
    ) -> list[jax.Array]:
        """Reduce the slices that the first collective brought, and do the second (traced).

        Args:
          payload_R: only its shapes count.
        """
        if self.codec is None:
            return shares.gather_sums(self.regions, buffers, weight_R)
        sliced = _slices(self.rows.codec_with_layout(like, specs))
        own_slice_R = shares.unpack_slices(self._packing_of_slices(payload_R, like, specs), buffers)
        reduced_R = self._reduced_slices(sliced, own_slice_R, weight_R, like)
        lies = self.rows.payload_specs(payload_R, like, specs, lead=2)
        packing = Packing(self.regions, reduced_R, lies, merged=True)
        return shares.gather_buffers(self.regions, packing.pack(reduced_R))

    def _dense_packing(self, payload_R: PyTree, specs: PyTree) -> Packing:
        fp32 = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), payload_R)
        return Packing(self.regions, fp32, specs, merged=True)

    def _packing_of_slices(self, payload_R: PyTree, like: PyTree, specs: PyTree) -> Packing:
        lies = self.rows.payload_specs(payload_R, like, specs, lead=2)
        return Packing(self.regions, payload_R, lies, lead=2, merged=True)

    @property
    def slices(self) -> Sliced | Staged | None:
        """The codec in slices, where payloads are reduced two-shot."""
        return _slices(self.codec)

    @property
    def _by_slices(self) -> bool:
        """Whether a region reduces one slice, and not everyone's whole payloads."""
        return not self.one_by_one and (self.codec is None or self.slices is not None)

    def _two_shot(self, payload_R, weight_R, like, specs, brought) -> PyTree:
        """Region r averages slice r of everyone's payload, and hands the coded mean to all."""
        sliced = _slices(self.rows.codec_with_layout(like, specs))
        if isinstance(payload_R, InSlices):
            everyone = payload_R.tree
        else:
            everyone = self._averages(sliced, payload_R, weight_R, like, specs, brought)
        by_rows = self._pinned_by_rows(like, specs)
        return self.regions.everywhere(lambda p: by_rows(sliced.decode(p, like)))(everyone)

    def _pinned_by_rows(self, like: PyTree, specs: PyTree) -> Callable[[PyTree], PyTree]:
        """Pins one region's leaves to their layout by rows, from within that region.

        Pinned outside, the compiler would move them there across regions, too.
        """
        lies = jax.tree.structure(like).flatten_up_to(self.rows.coded_specs(like, specs))

        def pin(tree: PyTree) -> PyTree:
            if not axes_inside():
                return tree
            leaves, treedef = jax.tree.flatten(tree)
            pinned = [
                jax.lax.with_sharding_constraint(x, spec) if any(spec) else x
                for x, spec in zip(leaves, lies)
            ]
            return treedef.unflatten(pinned)

        return pin

    def _averages(self, sliced, payload_R, weight_R, like, specs, brought) -> PyTree:
        """All slices of the mean, coded: `[R slices, ...]`."""
        lies = self.rows.payload_specs(payload_R, like, specs, lead=2)

        def reduced(own_slice_R):
            return self._reduced_slices(sliced, own_slice_R, weight_R, like)

        if brought is None:
            reduced_R = reduced(shares.exchange_slices(self.regions, payload_R, lies))
        else:
            reduced_R = jax.eval_shape(reduced, payload_R)
        return self._gathered(reduced_R, lies, brought)

    def _reduced_slices(self, sliced, own_slice_R, weight_R, like) -> PyTree:
        """Slice s of the mean, coded, of each region s: leaves `[R slices, ...]`."""

        def reduce_slice(slice_R, weight_R):
            return sliced.reduce_slice(slice_R, weight_R, like)

        return self.regions.lift(reduce_slice, (0, None))(own_slice_R, weight_R)

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
        return (two_shot if self._by_slices else all_gather)(nbytes, takes_part_R)


def _slices(codec: Any) -> Sliced | Staged | None:
    """The sliced codec, in every pipeline stage where there are some."""
    if not isinstance(codec, Staged):
        return slices_of(codec)
    inner = slices_of(codec.codec)
    return None if inner is None else dataclasses.replace(codec, codec=inner)


def without_lead(tree: PyTree) -> PyTree:
    """Shapes of one region, or one anchor, behind the leading axis."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)
