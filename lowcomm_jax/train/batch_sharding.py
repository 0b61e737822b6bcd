"""Keeps the activations of a loss function cut over the samples of a region's `fsdp` devices.

By itself the compiler may follow the parameters' sharding instead: it then computes the whole batch
on every device and sums activations over `fsdp`. A loss function of your own has two ways:

- `shard_batch_loss(loss_fn)`: nothing to change in it, and every device holds all weights whole;
- `shard_batch(x)` on the tokens, on the activations between layers, and on the logits: weights are
  gathered layer by layer.

Both do nothing where no mesh with an `fsdp` axis surrounds the call, as in a plain `jit`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lowcomm_jax.params.sharding import longest_axis
from lowcomm_jax.train.inner_step import loss_and_aux

FSDP, TENSOR = "fsdp", "tensor"
PyTree = Any


def shard_batch(x: jax.Array, *rest: str | None) -> jax.Array:
    """`x` with its first axis cut over `fsdp`; its gradient is cut the same way.

    Args:
      x: `[samples or tokens, ...]`, any dtype.
      rest: mesh axes of the other dimensions; those not given are whole on every device.
    """
    sizes = automatic_axes()
    axes = tuple(a if a is not None and sizes.get(a, 1) > 1 else None for a in (FSDP, *rest))
    return jax.lax.with_sharding_constraint(x, P(*axes)) if any(axes) else x


def shard_batch_loss(loss_fn: Callable) -> Callable:
    """A loss function whose batch is cut over `fsdp`: each device takes its own samples.

    The loss is the mean over the devices, weighted by the aux entry `tokens`, or by samples without
    one. It equals `loss_fn` of the whole batch if that is such a mean. Aux entries are averaged
    alike, `tokens` is summed, new values of `updates` are averaged with equal weights. Each device
    draws from a key of its own. Weights are gathered before the first layer, and gradients are
    summed and scattered after the last: a device needs memory for all of both. The loss of a device
    whose samples have no tokens must be finite.

    Args:
      loss_fn: `loss_fn(params, batch, rng)` -> scalar, or (scalar, aux dict), as for `Engine`.

    Returns:
      A function of the same kind, for `Engine`; with one `fsdp` device it is `loss_fn` itself.
    """

    @functools.wraps(loss_fn)
    def sharded(params, batch, rng):
        def part(params, batch_and_key):
            batch, key_data = batch_and_key
            rng = jax.random.wrap_key_data(key_data[0])
            out = loss_fn(params, batch, jax.random.fold_in(rng, jax.lax.axis_index(FSDP)))
            loss, aux = loss_and_aux(out)
            return _weighted(loss, aux, jax.tree.leaves(batch)[0].shape[0])

        count = automatic_axes().get(FSDP, 1)
        if count == 1:
            return loss_fn(params, batch, rng)
        key = jax.random.key_data(rng)
        keys = jnp.broadcast_to(key[None], (count, *key.shape))
        weighted, weight, updates = by_sample(part, params, (batch, keys))
        total = jnp.sum(weight)
        mean = {k: jnp.sum(x) / jnp.maximum(total, 1e-30) for k, x in weighted.items()}
        loss = mean.pop("loss")
        if "tokens" in mean:
            mean["tokens"] = total
        if updates:
            mean["updates"] = {k: jnp.mean(x, axis=0) for k, x in updates.items()}
        return loss, mean

    return sharded


def _weighted(loss, aux: dict, samples: int):
    """(loss and aux times weight, weight, updates) of one device, leaves `[1, ...]`."""
    aux = dict(aux)
    updates = aux.pop("updates", {})
    weight = jnp.asarray(aux.get("tokens", samples), jnp.float32)
    values = {**aux, "loss": loss}
    scaled = {k: (jnp.asarray(v, jnp.float32) * weight)[None] for k, v in values.items()}
    return scaled, weight[None], {k: x[None] for k, x in updates.items()}


def by_sample(fn: Callable, shared: PyTree, batch: PyTree) -> PyTree:
    """`fn(shared, batch)` on every one of several `fsdp` devices' own part of the batch.

    Each device gathers all of `shared`, which lies as `params.sharding.fsdp_specs` cuts it; the
    gradients of the devices are summed and scattered.

    Args:
      batch: leaves `[samples or tokens, ...]`, cut over `fsdp`; results of `fn` are cut alike.
    """
    count = automatic_axes()[FSDP]
    lies = jax.tree.map(lambda x: longest_axis(x.shape, count), shared)

    def part(shared, batch):
        return fn(jax.tree.map(_whole, shared, lies), batch)

    specs = jax.tree.map(lambda axis: P(*(None,) * axis, FSDP) if axis >= 0 else P(), lies)
    return over_fsdp(part, (specs, P(FSDP)), P(FSDP))(shared, batch)


def over_fsdp(part: Callable, in_specs: tuple, out_specs: P) -> Callable:
    """`part` on every `fsdp` device of a region, as `jax.shard_map` has it."""
    return jax.shard_map(
        part, in_specs=in_specs, out_specs=out_specs, axis_names={FSDP}, check_vma=False
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _whole(part: jax.Array, axis: int) -> jax.Array:
    """All devices' parts of a leaf; its gradient is summed in fp32, and scattered."""
    return part if axis < 0 else jax.lax.all_gather(part, FSDP, axis=axis, tiled=True)


def _gather(part, axis):
    return _whole(part, axis), None


def _scatter(axis, _, gradient):
    if axis < 0:  # `shard_map` sums the gradients of what every device has whole
        return (gradient,)
    wide = gradient.astype(jnp.float32)
    part = jax.lax.psum_scatter(wide, FSDP, scatter_dimension=axis, tiled=True)
    return (part.astype(gradient.dtype),)


_whole.defvjp(_gather, _scatter)


def summed_over_batch(fn: Callable, axis: int, *batch: PyTree) -> PyTree:
    """`fn(*batch)` of every `fsdp` device's own samples, summed over the devices and scattered.

    Args:
      axis: of the results of `fn`, along which the sum is cut over `fsdp`; -1 = whole everywhere.
    """
    if automatic_axes().get(FSDP, 1) == 1:
        return fn(*batch)

    def part(*batch):
        own = fn(*batch)
        if axis < 0:
            return jax.lax.psum(own, FSDP)
        return jax.lax.psum_scatter(own, FSDP, scatter_dimension=axis, tiled=True)

    cut = P(*(None,) * axis, FSDP) if axis >= 0 else P()
    return over_fsdp(part, tuple(P(FSDP) for _ in batch), cut)(*batch)


def automatic_axes() -> dict[str, int]:
    """Axes of the surrounding mesh that the compiler partitions over, with their sizes."""
    mesh = jax.sharding.get_abstract_mesh()
    return {
        name: mesh.shape[name]
        for name, kind in zip(mesh.axis_names, mesh.axis_types)
        if kind == AxisType.Auto
    }
