"""The device mesh cut into regions, and how one region's program is lifted to all of them.

Axes are `region`, `stage`, `fsdp`, `tensor`. Any number R of regions fits on any number of
devices: the `region` axis has S slots with S dividing R, and a slot holds R / S replicas, run one
after the other (`map`) or batched (`vmap`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lowcomm_jax import compat

AXES = ("region", "stage", "fsdp", "tensor")
REGION = "region"
CALLBACKS = ("debug_print", "debug_callback", "pure_callback", "io_callback")
Replicas = Literal["vmap", "map"]
PyTree = Any


def make_mesh(
    region: int = 1,
    stage: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Build the four-axis mesh over the first `region * stage * fsdp * tensor` devices.

    Axis types are Auto: inside a region the compiler places the collectives of FSDP and tensor
    parallelism; `region` is made manual by `Regions.lift`.

    Args:
      region, stage, fsdp, tensor: sizes of the axes.
      devices: in the order of the mesh, the last axis fastest. None = all of this program, slice by
        slice and process by process, so that a region's devices are close to one another.

    Raises:
      ValueError: fewer devices than the shape needs.
    """
    shape = (region, stage, fsdp, tensor)
    devices = all_devices() if devices is None else list(devices)
    need = math.prod(shape)
    if need > len(devices):
        raise ValueError(f"mesh {dict(zip(AXES, shape))} needs {need} devices, {len(devices)} here")
    grid = np.array(devices[:need]).reshape(shape)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def default_mesh(regions: int) -> Mesh:
    """Spread R regions over all devices: as many region slots as divide both, the rest FSDP."""
    devices = all_devices()
    slots = math.gcd(regions, len(devices))
    return make_mesh(region=slots, fsdp=len(devices) // slots, devices=devices)


def all_devices() -> list[jax.Device]:
    """All devices of this program: slice by slice, process by process."""
    return sorted(jax.devices(), key=lambda d: (slice_of(d), d.process_index, d.id))


def slice_of(device: jax.Device) -> int:
    """Number of the TPU slice a device belongs to.

    0 for other devices: for GPUs JAX counts hosts as slices, and a region may be several hosts.
    """
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0


@dataclasses.dataclass(frozen=True)
class Regions:
    """R regions laid over a mesh.

    Attributes:
      count: number of regions R.
      mesh: mesh with the axes `AXES`.
      replicas: how a slot runs the replicas it holds. `map` runs one after the other: activations
        of one replica at a time, bit-identical to a single replica. `vmap` batches them: equal
        within about 2e-7, and faster for models too small to fill the device.
    """

    count: int
    mesh: Mesh
    replicas: Replicas = "map"

    @property
    def slots(self) -> int:
        return self.mesh.shape[REGION]

    def sharding(self, *spec: str | None) -> NamedSharding:
        return NamedSharding(self.mesh, P(*spec))

    def idle_axes(self, spec: P) -> tuple[str, ...]:
        """Axes inside a region along which every device holds the same of a leaf of this spec."""
        used = {name for entry in spec for name in axis_names(entry)}
        return tuple(a for a in AXES[1:] if self.mesh.shape[a] > 1 and a not in used)

    def lift(self, fn: Callable, in_axes: Sequence[int | None], callbacks: bool = True) -> Callable:
        """Turn one region's pure function into the function of all regions.

        Args:
          fn: pure function of positional pytrees, written for one region.
          in_axes: per argument `0` (leaves carry the leading region axis R) or `None` (shared).
          callbacks: whether to look for calls of the host. False is for functions that are traced
            for shapes alone, which are then traced faster.

        Returns:
          A function over the same arguments; every output leaf carries a leading axis R. Inside,
          `region` is a manual axis, so that the compiler adds no collective across regions.
        """
        in_specs = tuple(P() if a is None else P(REGION) for a in in_axes)

        def slot(*args):
            return self._replicas(fn, args, in_axes)

        return self._manual(slot, in_specs) if callbacks else self._over(slot, in_specs)

    def everywhere(self, fn: Callable) -> Callable:
        """Turn a pure function of shared values into one that every region evaluates for itself.

        Without this the compiler may spread it over the regions, and communicate between them.
        """
        if self.mesh.size == 1:
            return fn
        return self.on_all_devices(fn, P(), P(), (REGION,))

    def on_devices(
        self,
        fn: Callable,
        in_axes: Sequence[int | None],
        in_specs: Sequence[PyTree],
        out_specs: PyTree,
    ) -> Callable:
        """`lift`, but `fn` gets every device's own parts: all axes of the mesh are manual.

        Args:
          in_specs: of each argument, `PartitionSpec`s inside a region, without the region axis; of
            an argument that is None they do not count.
          out_specs: of the results, likewise.
        """

        def call(*args):
            there = [i for i, x in enumerate(args) if x is not None]
            axes = [in_axes[i] for i in there]

            def slot(*own):
                def one(*own):
                    whole = dict(zip(there, own))
                    return fn(*(whole.get(i) for i in range(len(args))))

                return self._replicas(one, own, axes)

            def with_region(specs):
                return jax.tree.map(lambda spec: P(REGION, *spec), specs)

            given = tuple(
                in_specs[i] if in_axes[i] is None else with_region(in_specs[i]) for i in there
            )
            run = self.on_all_devices(slot, given, with_region(out_specs))
            return run(*(args[i] for i in there))

        return call

    def on_all_devices(
        self, fn: Callable, in_specs: PyTree, out_specs: PyTree, axes: Sequence[str] = AXES
    ) -> Callable:
        """`everywhere`, but `fn` gets every device's own parts (`shard_map`); see `on_devices`.

        Args:
          axes: that are manual; the others stay Auto.
        """
        # Nothing proves that results are equal along axes that their specs leave out. Checking it
        # would forbid users constants in the carries of their loops.
        return jax.shard_map(
            fn,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(axes),
            check_vma=False,
        )

    def _over(self, slot: Callable, in_specs: tuple[P, ...], axes=(REGION,)) -> Callable:
        """Of a slot's replicas: every output keeps its region axis."""
        return self.on_all_devices(slot, in_specs, P(REGION), axes)

    def _manual(self, slot: Callable, in_specs: tuple[P, ...]) -> Callable:
        """`shard_map` over the region axis alone, or, where `slot` calls the host, over all axes.

        JAX calls the host only from programs in which all axes are manual. Where a region is one
        device, both are the same but for the user's sharding constraints.
        """

        def call(*args):
            if jax.config.jax_disable_jit:
                raise ValueError(
                    "an engine runs compiled programs only: leave jax.disable_jit() out; "
                    "jax.debug.print shows values inside a loss_fn, and without jit the loss_fn "
                    "can be called by itself"
                )
            traced, like = jax.make_jaxpr(self._over(slot, in_specs), return_shape=True)(*args)
            called = host_calls(traced.jaxpr)
            if called:
                self._refuse_callbacks(called)
                try:
                    return self._over(slot, in_specs, AXES)(*args)
                except ValueError as error:
                    error.add_note(
                        f"{', '.join(called)}: a program that calls the host has no automatic axes;"
                        " leave sharding constraints, or the callback, out"
                    )
                    raise
            found = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *jax.tree.leaves(args))
            return jax.tree.unflatten(jax.tree.structure(like), found)

        return call

    def _refuse_callbacks(self, names: Sequence[str]) -> None:
        """Raise ValueError where a region is several devices."""
        inside = {a: self.mesh.shape[a] for a in AXES[1:] if self.mesh.shape[a] > 1}
        if inside:
            sizes = ", ".join(f"{axis}={size}" for axis, size in inside.items())
            raise ValueError(
                f"{', '.join(names)} in a loss_fn, optimizer or codec: JAX calls the host from no "
                f"region of several devices ({sizes}): return the value in the loss_fn's aux, or "
                "use a mesh with one device a region"
            )

    def _replicas(self, fn: Callable, args: Sequence[PyTree], in_axes: Sequence[int | None]):
        """Run the replicas of one slot; leading axis R / S of the per-region arguments."""
        if self.count == self.slots:
            return jax.tree.map(lambda x: x[None], fn(*_one(args, in_axes, 0)))
        if self.replicas == "vmap":
            return jax.vmap(fn, in_axes=tuple(in_axes))(*args)
        numbers = jax.numpy.arange(self.count // self.slots)
        return jax.lax.map(lambda i: fn(*_one(args, in_axes, i)), numbers)

    def lift_update(self, fn: Callable, in_axes: Sequence[int | None]) -> Callable:
        """`lift` for functions whose result replaces their first argument.

        With `map`, the replicas of a slot are updated in place, so that memory holds the state of
        all of them and the working copy of one.
        """

        def slot(carry, *args):
            if self.count == self.slots or self.replicas == "vmap":
                return self._replicas(fn, (carry, *args), in_axes)

            def one(i, carry):
                new = fn(*_one((carry, *args), in_axes, i))
                return jax.tree.map(lambda x, y: x.at[i].set(y), carry, new)

            return jax.lax.fori_loop(0, self.count // self.slots, one, carry)

        return self._manual(slot, tuple(P() if a is None else P(REGION) for a in in_axes))

    def mean(self, tree_R: PyTree, weight_R: jax.Array, specs: PyTree) -> PyTree:
        """Weighted fp32 mean over regions, summed in region order.

        Bit-identical for every mesh. Each device exchanges slices of its own shard with the same
        shard of the other regions, adds them in region order and gathers the sums back: a two-shot
        reduction, since `psum` promises no order. Devices of a region that hold the same shard
        exchange a share each, so that no value crosses twice. Regions of weight 0 contribute
        nothing, even when their values are not finite. With all weights 0 the mean is 0.

        Args:
          tree_R: leaves `[R, ...]`, any float dtype.
          weight_R: float32 `[R]`, not negative, not normalised.
          specs: `PartitionSpec` of each leaf without the region axis (axes inside a region).

        Returns:
          float32 leaves `[1, ...]`, the same in every region.
        """
        if self.slots == 1:
            return jax.tree.map(lambda x: ordered_mean(x, weight_R)[None], tree_R)
        every, treedef = jax.tree.flatten(tree_R)
        # A leaf without values takes no part: it has no slices.
        pairs = zip(every, treedef.flatten_up_to(specs))
        leaves, leaf_specs = zip(*((x, spec) for x, spec in pairs if x.size))
        idle = [self.idle_axes(spec) for spec in leaf_specs]
        scale = mean_scale(weight_R)
        reduced = jax.shard_map(
            lambda xs, w, s: [_two_shot(x, w, self.slots, axes) * s for x, axes in zip(xs, idle)],
            mesh=self.mesh,
            in_specs=([P(REGION, *s) for s in leaf_specs], P(), P()),
            out_specs=[P(None, *s) for s in leaf_specs],
        )(list(leaves), weight_R, scale)
        means, empty = iter(reduced), jax.numpy.zeros
        return treedef.unflatten(
            [next(means) if x.size else empty((1, *x.shape[1:])) for x in every]
        )


def host_calls(jaxpr: Any) -> list[str]:
    """Names of the primitives that call the host, in the order of their first call."""
    found: dict[str, None] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in CALLBACKS:
            found[eqn.primitive.name] = None
        for inside in compat.jaxprs_in_params(eqn.params):
            found |= dict.fromkeys(host_calls(inside))
    return list(found)


def _one(args: Sequence[PyTree], in_axes: Sequence[int | None], i) -> list[PyTree]:
    """The arguments of replica i of a slot."""
    return [a if ax is None else jax.tree.map(lambda x: x[i], a) for a, ax in zip(args, in_axes)]


def _ordered_sum(x_RxN: jax.Array) -> jax.Array:
    """Sum over the leading axis, one region after the other."""
    total = x_RxN[0]
    for r in range(1, x_RxN.shape[0]):
        total = total + x_RxN[r]
    return total


def ordered_mean(x_RxN: jax.Array, weight_R: jax.Array) -> jax.Array:
    """Weighted fp32 mean over the leading axis, in region order; see `Regions.mean`."""
    return weighted_sum(x_RxN, weight_R) * mean_scale(weight_R)


def mean_scale(weight_R: jax.Array) -> jax.Array:
    """Factor that makes a mean of a `weighted_sum`, float32 `[]`; 0 where all weights are 0."""
    total = _ordered_sum(weight_R)
    return jax.numpy.where(total > 0, 1.0 / jax.numpy.where(total > 0, total, 1.0), 0.0)


def weighted_sum(x_RxN: jax.Array, weight_R: jax.Array) -> jax.Array:
    """fp32 sum over regions of weight * value, in region order; with weight 0 NaN counts as 0."""
    shape = (-1,) + (1,) * (x_RxN.ndim - 1)
    weight = weight_R.reshape(shape)
    terms = jax.numpy.where(weight > 0, x_RxN.astype(jax.numpy.float32) * weight, 0.0)
    return _ordered_sum(terms)


def _two_shot(x_LxN: jax.Array, weight_R: jax.Array, slots: int, idle: Sequence[str]) -> jax.Array:
    """Ordered sum over all regions of a slot's own shard: exchange slices, add, gather."""
    local, shape = x_LxN.shape[0], x_LxN.shape[1:]
    whole = x_LxN.astype(jax.numpy.float32).reshape(local, -1)
    flat = take_share(whole, idle)
    size = flat.shape[1]
    padded = -(-size // slots) * slots
    flat = jax.numpy.pad(flat, ((0, 0), (0, padded - size)))
    # Slot s receives slice s of every region; concatenation over slots is region order.
    slices_RxN = jax.lax.all_to_all(flat, REGION, split_axis=1, concat_axis=0, tiled=True)
    part = weighted_sum(slices_RxN, weight_R)
    share = compat.all_gather_invariant(part, REGION, axis=0)[:size]
    return join_shares(share, idle, whole.shape[1]).reshape(1, *shape)


def take_share(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Under `shard_map`: this device's part of `[..., M]`, which is equal along `axes`.

    Zeros fill the last part up: fewer values than devices along `axes`.
    """
    if not axes:
        return x
    count, each = jax.lax.axis_size(tuple(axes)), share_of(x.shape[-1], axes)
    x = jax.numpy.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, each * count - x.shape[-1])])
    parts = x.reshape(*x.shape[:-1], count, each)  # an index of values may exceed int32
    return jax.lax.dynamic_index_in_dim(
        parts, jax.lax.axis_index(tuple(axes)), axis=-2, keepdims=False
    )


def share_of(size: int, axes: Sequence[str]) -> int:
    """Under `shard_map`: length of a `take_share` of `size` values."""
    return -(-size // jax.lax.axis_size(tuple(axes))) if axes else size


def join_shares(x: jax.Array, axes: Sequence[str], size: int) -> jax.Array:
    """Inverse of `take_share`: `[..., size]`, gathered inside the region."""
    if not axes:
        return x
    whole = compat.all_gather_invariant(x, tuple(axes), axis=x.ndim - 1)
    return jax.lax.slice_in_dim(whole, 0, size, axis=-1)


def axis_names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Mesh axes of one entry of a `PartitionSpec`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
