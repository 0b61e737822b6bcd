"""Exchanges payloads of all regions inside one JAX program, over the mesh's region axis.

In: every region's pseudo-gradient of one fragment (`MeshExchange.encode`), then the payloads and
the weights of a round (`reduce`). Out: the weighted mean, and the bytes announced for it
(`traffic`).

It serves simulations on one machine, and several slices in one `jax.distributed` job. Its
collectives are part of the anchor update, and the device waits for them. Or they run beside the
inner steps of a payload's delay (`begin`, `go_on`; `sync.concurrent_exchange` makes that program),
and `reduce` takes their results.

A codec that knows where leaves lie (`Codec.local`) runs on every device's own parts, under a
`shard_map` over all axes; the others are given whole leaves, and the compiler places the
communication inside a region.

The bytes of every collective are counted by a function of its name: `two_shot`, `all_gather`,
`pair`, and between jobs `in_halves`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from lowcomm_jax.compression.base import Codec
from lowcomm_jax.compression.two_shot import per_tensor
from lowcomm_jax.exchange import shares
from lowcomm_jax.exchange.shares import Packing
from lowcomm_jax.mesh.regions import REGION, Regions, axis_names, mean_scale, ordered_mean
from lowcomm_jax.mesh.stages import STAGE
from lowcomm_jax.params.fragments import path_name
from lowcomm_jax.params.sharding import NEAR_SCALAR, leaf_of
from lowcomm_jax.rules.topology import Groups

PyTree = Any


class Traffic(NamedTuple):
    """Bytes of one exchange.

    Attributes:
      route: name of the collective.
      nbytes: bytes of one participant's payload.
      sent, received: int64 `[R]`, bytes that leave and enter each region.
    """

    route: str
    nbytes: int
    sent: np.ndarray
    received: np.ndarray

    def plus(self, other: Traffic) -> Traffic:
        """Both exchanges together, under this one's route."""
        return Traffic(
            self.route,
            self.nbytes + other.nbytes,
            self.sent + other.sent,
            self.received + other.received,
        )


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
      specs: `PartitionSpec` inside a region of each leaf, by path; leaves without one are whole on
        every device.
      one_by_one: whether all payloads go to everyone: a merge rule reads them one by one
        (`everyone`), or weighs what cannot be scaled where it is sent (`weighted`).
      parts: slices of a coded payload, one for each region of the run; None = payloads go whole.
      separate: whether this program is one region of several jobs, which cut its payloads
        themselves (`rounds.slicing`), so that slices do not depend on its devices.
    """

    regions: Regions
    codec: Codec | None = None
    specs: Mapping[str, P] = dataclasses.field(default_factory=dict, hash=False)
    one_by_one: bool = False
    parts: int | None = None
    separate: bool = False

    def at(self, level: int) -> MeshExchange:
        """The exchange of payloads encoded at this level of the codec."""
        codec = None if self.codec is None else self.codec.at(level)
        return self if codec is self.codec else dataclasses.replace(self, codec=codec)

    # -- where arrays lie --------------------------------------------------------------------------

    def placed(self, like: PyTree) -> Codec:
        """The codec for leaves of these shapes, as devices of a region hold them."""
        return self._coder.placed(like, self.specs, self.regions.mesh.shape, self._staged)

    def whole(self, like: PyTree) -> Codec:
        """The codec where one device holds all of the leaves, or of a stage's parts."""
        sizes = {axis: n if axis == STAGE else 1 for axis, n in self.regions.mesh.shape.items()}
        return self._coder.placed(like, self.specs, sizes, self._staged)

    @property
    def _coder(self) -> Codec | None:
        """The codec of what travels, whole or in slices; None = dense."""
        return self.codec if self.parts is None else self.codec.in_slices(self.parts)

    @property
    def _staged(self) -> bool:
        return self.regions.mesh.shape[STAGE] > 1

    def specs_of(self, like: PyTree) -> PyTree:
        """`PartitionSpec` of each leaf inside a region."""

        def one(path, _):
            return self.specs.get(path_name(path), P())

        return jax.tree_util.tree_map_with_path(one, like)

    def state_specs(self, state: PyTree, like: PyTree) -> PyTree:
        """Layout of a codec's state of one region.

        An array of a leaf's shape lies as the leaf while it is coded; others lie as their codec
        says, or are whole on every device of the region.

        Raises:
          ValueError: an array of more than a few values belongs to no leaf, by its path, while
            leaves are cut: it would be whole on every device.
        """
        codec = self.placed(like)
        inner, places, known = per_tensor(codec), codec.places, {}
        if inner is not None:
            shapes, specs = jax.eval_shape(lambda: inner.init(like)), inner.state_specs(like)
            for (path, x), spec in zip(
                jax.tree_util.tree_flatten_with_path(shapes)[0], jax.tree.leaves(specs)
            ):
                known[leaf_of(path, shapes, like), x.shape, x.dtype] = spec
        sizes = self.regions.mesh.shape
        cut = any(sizes[a] > 1 for s in self.specs.values() for e in s for a in axis_names(e))

        def one(path, x):
            name = leaf_of(path, state, like)
            if name is None:
                if cut and math.prod(x.shape) > NEAR_SCALAR:
                    raise ValueError(self._homeless(path, x.shape))
                return P()
            if (spec := known.get((name, x.shape, x.dtype))) is not None:
                return spec
            if like[name].shape == x.shape:
                return places[name].spec if name in places else self.specs.get(name, P())
            return P()

        return jax.tree_util.tree_map_with_path(one, state)

    def _homeless(self, path: tuple, shape: tuple[int, ...]) -> str:
        return (
            f"codec {self.codec.name}: its state {jax.tree_util.keystr(path)} {list(shape)} stands "
            "under no leaf's name, so every device of a region would hold all of it; keep an array "
            "for each leaf, in dicts with the keys of `like` (jax.tree.map over `like` makes them)"
        )

    def payload_like(self, like: PyTree) -> PyTree:
        """Shapes of one region's payload, as it is kept and sent."""
        values = {k: jax.ShapeDtypeStruct(x.shape, jnp.float32) for k, x in like.items()}
        if self.codec is None:
            return values
        count = self.regions.count

        def encode(values):
            values, state = jax.tree.map(
                lambda x: jnp.broadcast_to(x, (count, *x.shape)),
                (values, self.whole(like).init(like)),
            )
            return self.encode(values, state, params_A=values)[0]

        return without_lead(jax.eval_shape(encode, values))

    @property
    def _deals(self) -> bool:
        """Whether payloads of this program's regions are in slices."""
        return self.parts is not None and not self.separate

    def payload_specs(self, like: PyTree) -> PyTree:
        """Layout of a region's payload, coded or dense; of a slice of it where it is in slices."""
        return self.specs_of(like) if self.codec is None else self.placed(like).payload_specs(like)

    # -- encoding ----------------------------------------------------------------------------------

    def encode(
        self,
        delta_R: PyTree,
        state_R: PyTree,
        accepted_R: jax.Array | None = None,
        params_A: PyTree = None,
    ) -> tuple[PyTree, PyTree]:
        """Every region's payload and new codec state (traced), coded where the leaves lie.

        Args:
          delta_R: fp32 leaves `[R, ...]`; state_R: codec states `[R, ...]`.
          accepted_R: bool `[R]`; where it is False the state stays as it was. None = all True.
          params_A: for a codec that reads the weights, leaves `[R, ...]`, or `[1, ...]` where all
            regions read the same.
        """
        return self._encode(delta_R, state_R, accepted_R, params_A, measure=False)[:2]

    def encode_and_measure(
        self,
        delta_R: PyTree,
        state_R: PyTree,
        accepted_R: jax.Array | None = None,
        params_A: PyTree = None,
    ) -> tuple[PyTree, PyTree, jax.Array, jax.Array]:
        """As `encode`; ||decoded - delta|| and the share decoded as other than 0, fp32 `[R]`."""
        return self._encode(delta_R, state_R, accepted_R, params_A, measure=True)

    def _encode(self, delta_R, state_R, accepted_R, params_A, measure: bool):
        like = without_lead(delta_R)
        codec, own = self.placed(like), self.specs_of(like)

        def encode(delta, state, accepted, params):
            delta = _moved(codec, delta)
            params = None if params is None else _moved(codec, params)
            payload, new_state = codec.encode_if(accepted, delta, state, params)
            missed = share = None
            if measure:
                decoded = codec.decode(payload, delta)
                apart = jax.tree.map(jnp.subtract, decoded, delta)
                missed = jnp.sqrt(_squares(codec, apart))
                sent = jax.tree.map(lambda x: (x != 0).astype(jnp.float32), decoded)
                share = _squares(codec, sent) / sum(math.prod(x.shape) for x in like.values())
            if self._deals:
                payload = codec.deal(payload, like)
            return payload, new_state, missed, share

        params, axis = (params_A, 0) if codec.reads_params else (None, 0)
        if params is not None and next(iter(params.values())).shape[0] == 1:
            params, axis = {k: x[0] for k, x in params.items()}, None
        args, axes = (delta_R, state_R, accepted_R, params), (0, 0, 0, axis)
        states = self.state_specs(without_lead(state_R), like)
        if not codec.local:
            payload_R, new_R, *measured = self.regions.lift(encode, axes)(*args)
            return payload_R, self._pinned(new_R, states), *measured
        lies = codec.payload_specs(like)
        if self._deals:
            lies = jax.tree.map(lambda spec: P(None, *spec), lies)
        told = P() if measure else None
        given, made = (own, states, P(), own), (lies, states, told, told)
        return self.regions.on_devices(encode, axes, given, made)(*args)

    def _pinned(self, tree_R: PyTree, specs: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(tree_R)
        where = [self.regions.sharding(REGION, *s) for s in treedef.flatten_up_to(specs)]
        return treedef.unflatten(jax.lax.with_sharding_constraint(leaves, where))

    def decode(self, payload_R: PyTree, like: PyTree) -> PyTree:
        """Every region's decoded payload, fp32 `[R, ...]` (traced); see `encode`."""
        codec = self.placed(like)

        def decode(payload):
            if self._deals:
                payload = codec.undeal(payload, like)
            return _moved(codec, codec.decode(payload, like), back=True)

        if not codec.local:
            return self.regions.lift(decode, (0,))(payload_R)
        lies = codec.payload_specs(like)
        if self._deals:
            lies = jax.tree.map(lambda spec: P(None, *spec), lies)
        return self.regions.on_devices(decode, (0,), (lies,), self.specs_of(like))(payload_R)

    def receive(self, mean: PyTree, state_R: PyTree, counted_R: jax.Array) -> tuple[PyTree, PyTree]:
        """(the mean as every region's codec receives it, fp32 `[R, ...]`; codec states) (traced).

        mean: fp32 leaves `[1, ...]`; counted_R: bool `[R]`, whose payload is in it.
        """
        shared = jax.tree.map(lambda x: x[0], mean)
        codec, own = self.placed(shared), self.specs_of(shared)

        def receive(mean, state, counted):
            direction, state = codec.receive(_moved(codec, mean), state, counted)
            return _moved(codec, direction, back=True), state

        states = self.state_specs(without_lead(state_R), shared)
        given, made = (own, states, P()), (own, states)
        run = self.regions.on_devices(receive, (None, 0, 0), given, made)
        return run(shared, state_R, counted_R)

    # -- the mean ----------------------------------------------------------------------------------

    def reduce(
        self,
        payload_R: PyTree,
        weight_R: jax.Array,
        like: PyTree,
        energy: float | None = None,
        brought: Sequence[jax.Array] | None = None,
    ) -> Reduced:
        """Weighted mean of the decoded payloads; fp32 leaves `[1, ...]` (traced).

        Dense payloads are reduced slice by slice. Encoded ones are sent to every region, decoded,
        and added in region order; or reduced slice by slice and encoded a second time.

        Args:
          payload_R: leaves `[R, ...]`, or `InSlices`.
          like: shapes of one region's fragment.
          energy: of the rank to measure (`Codec.mean_rank`); None = do not measure it.
          brought: result of the last of the `collectives`; of `payload_R` only the shapes are then
            used. None = the collectives run here.
        """
        if self.codec is None:
            return Reduced(self._dense_mean(payload_R, weight_R, like, brought), None)
        if isinstance(payload_R, InSlices):
            return Reduced(self._everywhere(payload_R.tree, like), None)
        if self._deals:
            slices = self._averages(payload_R, weight_R, like, brought)
            return Reduced(self._everywhere(slices, like, dealt=True), None)
        return self._one_shot(payload_R, weight_R, like, energy, brought)

    def _dense_mean(self, payload_R, weight_R, like, brought) -> PyTree:
        # Multiplied in this program, as `Regions.mean` does: it may become part of a fused
        # multiply-add with what follows, and must then be in every job, too.
        if isinstance(payload_R, InSlices):
            scale = mean_scale(weight_R)
            return jax.tree.map(lambda x: x[None] * scale, payload_R.tree)
        if brought is not None:
            scale = mean_scale(weight_R)
            sums = shares.join_buffers(self.regions, brought)
            found = self._dense_packing(payload_R, like).unpack(sums, (None,))
            return jax.tree.map(lambda x: x * scale, found)
        return self.regions.mean(payload_R, weight_R, self.specs_of(like))

    def _one_shot(self, payload_R, weight_R, like, energy, brought) -> Reduced:
        """The mean of all regions' payloads, which everyone gets."""
        everyone_R = self._gathered(payload_R, self.payload_specs(like), brought)
        codec = self.placed(like)

        def reduce(payload_R, weight_R):
            mean = codec.aggregate(payload_R, weight_R, like)
            rank = None
            if energy is not None:
                rank = codec.mean_rank(payload_R, weight_R, like, energy)
            return _lead(_moved(codec, mean, back=True)), rank

        if not codec.local:
            return Reduced(*self.regions.everywhere(reduce)(everyone_R, weight_R))
        given = (_behind(codec.payload_specs(like)), P())
        made = (_behind(self.specs_of(like)), P())
        return Reduced(*self.regions.on_all_devices(reduce, given, made)(everyone_R, weight_R))

    def group_mean(self, payload_RxN: PyTree, weight_RxN: jax.Array, like: PyTree) -> PyTree:
        """For every region the mean of n payloads that it has: fp32 leaves `[R, ...]` (traced)."""
        codec = self.placed(like)

        def aggregate(payload_N, weight_N):
            return _moved(codec, codec.aggregate(payload_N, weight_N, like), back=True)

        if not codec.local:
            return self.regions.lift(aggregate, (0, 0))(payload_RxN, weight_RxN)
        given = (_behind(codec.payload_specs(like)), P())
        run = self.regions.on_devices(aggregate, (0, 0), given, self.specs_of(like))
        return run(payload_RxN, weight_RxN)

    def _everywhere(self, payload: PyTree, like: PyTree, dealt: bool = False) -> PyTree:
        """The values of a payload that every region has, whole or in slices: `[1, ...]`."""
        codec = self.placed(like)

        def decode(payload):
            if dealt:
                payload = codec.undeal(payload, like)
            return _lead(_moved(codec, codec.decode(payload, like), back=True))

        # Of slices joined by jobs, an array of a matrix has an entry for each of their units.
        lies = codec.payload_specs(like, None if dealt else payload)
        given = (_behind(lies) if dealt else lies,)
        made = _behind(self.specs_of(like))
        return self.regions.on_all_devices(decode, given, made)(payload)

    def everyone(
        self, payload_R: PyTree, like: PyTree, brought: Sequence[jax.Array] | None = None
    ) -> PyTree:
        """The decoded payloads of all regions, in every region: fp32 `[R, ...]` (traced).

        Args: as in `reduce`.
        """
        payload_R = self._gathered(payload_R, self.payload_specs(like), brought)
        if self.codec is None:
            return jax.tree.map(lambda x: x.astype(jnp.float32), payload_R)
        codec = self.placed(like)

        def decode(payload_R):
            def one(payload):
                return _moved(codec, codec.decode(payload, like), back=True)

            return jax.lax.map(one, payload_R)

        if not codec.local:
            return self.regions.everywhere(decode)(payload_R)
        given, made = (_behind(codec.payload_specs(like)),), _behind(self.specs_of(like))
        return self.regions.on_all_devices(decode, given, made)(payload_R)

    def weighted(
        self,
        payload_R: PyTree,
        weight_R: Mapping[str, jax.Array],
        like: PyTree,
        brought: Sequence[jax.Array] | None = None,
    ) -> PyTree:
        """Mean of the decoded payloads by weights of each tensor: fp32 leaves `[1, ...]` (traced).

        Unless they go `one_by_one`, dense payloads are scaled where they are, and reduced.

        Args:
          payload_R, like, brought: as in `reduce`.
          weight_R: by leaf, float32 `[R]`, or `[R, layers]`; not negative, not normalised. Where
            all regions have 0 the mean is 0.
        """
        rows = next(iter(weight_R.values())).shape[0]  # of all regions, also in one of their jobs
        equal_R = jnp.ones(rows, jnp.float32)

        def scaled(values_R):
            def one(x_R, weight_R):
                # Of a mean of 1, so that the mean of what is scaled is the weighted mean.
                weight_R = weight_R * (weight_R.shape[0] * mean_scale(weight_R))[None]
                wide = weight_R.reshape(*weight_R.shape, *(1,) * (x_R.ndim - weight_R.ndim))
                return jnp.where(wide > 0, x_R.astype(jnp.float32) * wide, 0.0)

            return {name: one(x_R, weight_R[name]) for name, x_R in values_R.items()}

        if not self.one_by_one:
            return self.regions.mean(scaled(payload_R), equal_R, self.specs_of(like))

        def mean(values_R, equal_R):
            return {k: ordered_mean(x, equal_R)[None] for k, x in scaled(values_R).items()}

        return self.regions.everywhere(mean)(self.everyone(payload_R, like, brought), equal_R)

    def _gathered(self, tree_R, lies, brought) -> PyTree:
        """Every region's tree in all regions: `[R, ...]`, gathered here or as it was brought."""
        if brought is None:
            return shares.gather(self.regions, tree_R, lies)
        return Packing(self.regions, tree_R, lies, one_buffer=True).unpack(brought, (None,))

    # -- the collectives one by one, for who lets other work run beside them -----------------------

    @property
    def collectives(self) -> int:
        """Number of collectives that a reduction does one after the other."""
        if self.regions.slots == 1:
            return 0
        return 2 if self._by_slices else 1

    def begin(self, payload_R: PyTree, like: PyTree) -> list[jax.Array]:
        """Pack the payloads, and do the first of the `collectives`: its buffers (traced)."""
        if not self._by_slices:
            packing = Packing(self.regions, payload_R, self.payload_specs(like), one_buffer=True)
            return shares.gather_buffers(self.regions, packing.pack(payload_R))
        if self.codec is None:
            fp32 = jax.tree.map(lambda x: x.astype(jnp.float32), payload_R)
            buffers = self._dense_packing(fp32, like).pack(fp32)
            return shares.swap_buffers(self.regions, shares.cut_buffers(self.regions, buffers))
        buffers = self._packing_of_slices(payload_R, like).pack(payload_R)
        return shares.swap_buffers(self.regions, buffers)

    def go_on(
        self,
        buffers: Sequence[jax.Array],
        payload_R: PyTree,
        weight_R: jax.Array,
        like: PyTree,
    ) -> list[jax.Array]:
        """Reduce the slices that the first collective brought, and do the second (traced).

        Args:
          payload_R: only its shapes count.
        """
        if self.codec is None:
            return shares.gather_sums(self.regions, buffers, weight_R)
        own_slice_R = shares.unpack_slices(self._packing_of_slices(payload_R, like), buffers)
        reduced_R = self._recoded(own_slice_R, weight_R, like)
        packing = Packing(self.regions, reduced_R, self.payload_specs(like), one_buffer=True)
        return shares.gather_buffers(self.regions, packing.pack(reduced_R))

    def _dense_packing(self, payload_R: PyTree, like: PyTree) -> Packing:
        fp32 = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), payload_R)
        return Packing(self.regions, fp32, self.specs_of(like), one_buffer=True)

    def _packing_of_slices(self, payload_R: PyTree, like: PyTree) -> Packing:
        return Packing(self.regions, payload_R, self.payload_specs(like), lead=2, one_buffer=True)

    @property
    def _by_slices(self) -> bool:
        """Whether a region reduces one slice, and not everyone's whole payloads."""
        return not self.one_by_one and (self.codec is None or self._deals)

    def _averages(self, payload_R, weight_R, like, brought) -> PyTree:
        """All slices of the mean, coded: `[R slices, ...]`; region r averages slice r."""
        lies = self.payload_specs(like)

        def recoded(own_slice_R):
            return self._recoded(own_slice_R, weight_R, like)

        if brought is None:
            reduced_R = recoded(shares.exchange_slices(self.regions, payload_R, lies))
        else:
            reduced_R = jax.eval_shape(recoded, payload_R)
        return self._gathered(reduced_R, lies, brought)

    def _recoded(self, own_slice_R, weight_R, like) -> PyTree:
        """Slice s of the mean, coded, of each region s: leaves `[R slices, ...]`."""
        codec, lies = self.placed(like), self.payload_specs(like)

        def recode(slice_R, weight_R, number):
            return codec.recode(slice_R, weight_R, number, like)

        numbers = jnp.arange(self.parts, dtype=jnp.int32)
        given = (_behind(lies), P(), P())
        run = self.regions.on_devices(recode, (0, None, 0), given, lies)
        return run(own_slice_R, weight_R, numbers)

    def nbytes(self, like: PyTree) -> int:
        """Bytes of one region's payload for a fragment of these shapes."""
        if self.codec is None:
            return 4 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(like))
        leaves, tree = jax.tree.flatten(like)
        shapes = tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if shapes not in self._counted:
            codec = self.whole(like) if self.separate else self.placed(like)
            count = codec.nbytes if self.parts is None else codec.dealt_nbytes
            self._counted[shapes] = count(like)
        return self._counted[shapes]

    @functools.cached_property
    def _counted(self) -> dict[Any, int]:
        """What `nbytes` has counted: it is asked at every send."""
        return {}

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


def two_shot(nbytes: int, takes_part_R: np.ndarray) -> Traffic:
    """Exchange slices, reduce, gather: each of m participants sends 2 (m-1)/m of the payload.

    Regions that take no part still receive the result (their anchor moves): nbytes, sent by the
    participants in equal shares.
    """
    part = np.asarray(takes_part_R, bool)
    m, absent = int(part.sum()), int((~part).sum())
    if m == 0:
        return _nothing("two_shot", nbytes, part)
    own = round(2 * nbytes * (m - 1) / m)
    # The result reaches absent regions from the participants, in shares that differ by a byte.
    share, rest = divmod(absent * nbytes, m)
    extra = share + (np.cumsum(part) <= rest)
    sent = np.where(part, own + extra, 0)
    received = np.where(part, own, nbytes)
    return Traffic("two_shot", nbytes, sent.astype(np.int64), received.astype(np.int64))


def in_halves(nbytes: int, takes_part_R: np.ndarray) -> Traffic:
    """`two_shot` between jobs, where a region that takes no part still reduces a slice.

    Args:
      nbytes: of a payload in as many equal slices as there are regions.
    """
    part = np.asarray(takes_part_R, bool)
    m = int(part.sum())
    if m == 0:
        return _nothing("two_shot", nbytes, part)
    each, others = nbytes // part.size, part.size - 1
    sent = each * others * (1 + part.astype(np.int64))
    received = each * (m - part + others)
    return Traffic("two_shot", nbytes, sent, received.astype(np.int64))


def all_gather(nbytes: int, takes_part_R: np.ndarray) -> Traffic:
    """Every participant sends its payload to every other region."""
    part = np.asarray(takes_part_R, bool)
    m = int(part.sum())
    if m == 0:
        return _nothing("all_gather", nbytes, part)
    sent = np.where(part, nbytes * (part.size - 1), 0)
    received = np.where(part, nbytes * (m - 1), nbytes * m)
    return Traffic("all_gather", nbytes, sent.astype(np.int64), received.astype(np.int64))


def pair(nbytes: int, takes_part_R: np.ndarray, groups: Groups) -> Traffic:
    """`all_gather` inside each group: each member sends to its partners only."""
    part = np.asarray(takes_part_R, bool)
    total = _nothing("pair", nbytes, part)
    for group in groups:
        members = list(group)
        _, _, sent, received = all_gather(nbytes, part[members])
        total.sent[members] = sent
        total.received[members] = received
    return total


def _nothing(route: str, nbytes: int, part: np.ndarray) -> Traffic:
    zeros = np.zeros(part.size, np.int64)
    return Traffic(route, nbytes, zeros, zeros.copy())


def _moved(codec: Codec, tree: PyTree, back: bool = False) -> PyTree:
    """A device's parts of leaves, moved to where they are coded, or back."""
    places = codec.places
    if not places:
        return tree

    def one(path, x):
        place = places[path_name(path)]
        return place.leave(x) if back else place.enter(x)

    return jax.tree_util.tree_map_with_path(one, tree)


def _squares(codec: Codec, tree: PyTree) -> jax.Array:
    """Sum of squares of leaves of which devices hold parts, fp32 `[]`."""
    places, total = codec.places, jnp.float32(0)
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        square = jnp.sum(jnp.square(x))
        place = places.get(path_name(path))
        axes = () if place is None else tuple(a for e in place.spec for a in axis_names(e))
        total += jax.lax.psum(square, axes) if axes else square
    return total


def _lead(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[None], tree)


def _behind(specs: PyTree) -> PyTree:
    return jax.tree.map(lambda spec: P(None, *spec), specs)


def without_lead(tree: PyTree) -> PyTree:
    """Shapes of one region, or one anchor, behind the leading axis."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)
