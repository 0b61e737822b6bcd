"""One region's pure train step, and the programs that run it in all regions.

The step reads no other region's values. `Regions.lift` runs it in each region inside `shard_map`
with a manual `region` axis, so that the program cannot communicate across regions.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lowcomm_jax.mesh.regions import Regions
from lowcomm_jax.params.layout import Layout
from lowcomm_jax.setup import Setup
from lowcomm_jax.state.train_state import Inner

PyTree = Any
UPDATES = "updates"  # key of a loss_fn's aux under which new non-trainable leaves are returned
RESERVED = (
    *("step", "events", "loss", "grad_norm", "skipped", "active", "away"),
    *("mean_norm", "update_norm", "delta_norm", "left_out"),  # of gradient exchange
    *("trainers", "work", "merges", "looks"),  # of an `AdaptiveEngine` (its `run`)
)
"""Names of a step's own metrics and of the entries of its row, which no aux may have."""


@dataclasses.dataclass(frozen=True)
class InnerStep:
    """One region's inner step.

    Attributes:
      setup: settings of the engine. Its optimizer sees the user's tree with None for untrained
        leaves.
      layout: structure and roles of the user's tree.
      gives_loss: whether the optimizer's update takes `value`, the step's loss.
      reserved: names that no aux may have, beside `RESERVED` (`Method.metrics`).
      trained: leaf name -> bool `[R, ...]`, what each region here trains (`params.roles`); leaves
        without a name are trained whole.
    """

    setup: Setup
    layout: Layout
    gives_loss: bool = False
    reserved: tuple[str, ...] = ()
    trained: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict, compare=False)
    _warned: set[str] = dataclasses.field(default_factory=set, repr=False, compare=False)

    def init(self, params: dict[str, jax.Array]) -> PyTree:
        return self.setup.optimizer.init(self.layout.tree(params))

    def gradients(self, params, buffers, frozen, batch, rng):
        """Mean gradient of one region's batch.

        Returns:
          (gradients by name, new buffers, metrics): metrics holds fp32 scalars `loss`, `tokens`
          and the aux of `loss_fn`.
        """
        n = self.setup.accumulate
        if n == 1:
            (loss, (aux, buffers)), grads = self._grad_fn(params, buffers, frozen, batch, rng)
            return grads, buffers, _metrics(loss, aux, batch)
        micro = jax.tree.map(lambda x: x.reshape(n, x.shape[0] // n, *x.shape[1:]), batch)

        def part(i):
            return jax.tree.map(lambda x: x[i], micro)

        return self.accumulated(params, buffers, frozen, part, n, rng)

    @property
    def _grad_fn(self):
        return jax.value_and_grad(self._named_loss, has_aux=True)

    def _named_loss(self, params, buffers, frozen, batch, rng):
        tree = self.layout.tree({**params, **buffers, **frozen})
        out = self.setup.loss_fn(tree, batch, rng)
        loss, aux = loss_and_aux(out, self.reserved)
        if UPDATES in aux:
            buffers = {**buffers, **_named_updates(aux.pop(UPDATES), buffers)}
        else:
            self._warn_of_still(buffers)
        return loss, (aux, buffers)

    def _warn_of_still(self, buffers: dict[str, jax.Array]) -> None:
        """Warn, once a step, of running statistics that no loss_fn replaces."""
        still = [k for k, v in buffers.items() if jnp.issubdtype(v.dtype, jnp.floating)]
        if not self._warned.issuperset(still):
            self._warned.update(still)
            warnings.warn(
                f"loss_fn returns no aux[{UPDATES!r}], so that these leaves of role 'local' or "
                f"'average' never change: {', '.join(map(repr, still))}; return "
                f"(loss, {{{UPDATES!r}: {{{still[0]!r}: new value, ...}}}}), or give them the role "
                "'frozen'",
                stacklevel=2,
            )

    def accumulated(self, params, buffers, frozen, part, count, rng):
        """Mean gradient of several microbatches, weighted by their tokens.

        Equals the gradient of one batch that holds them all when `loss_fn` is a mean over the
        tokens it reports (over samples, where it reports none); see `mean_over_microbatches`.

        Args:
          part: `i -> batch` of microbatch i, all of one shape.
          count: number of microbatches, at least 1; may be traced.
          rng: microbatch i gets `part_key(rng, i)`.

        Returns:
          As `gradients`; metrics other than `tokens` are means weighted by tokens.
        """

        def one(i, buffers):
            batch, key = part(i), part_key(rng, i)
            (loss, (aux, buffers)), grads = self._grad_fn(params, buffers, frozen, batch, key)
            metrics = _metrics(loss, aux, batch)
            tokens = metrics.pop("tokens")
            return (grads, metrics), tokens, buffers

        (grads, metrics), tokens, buffers = mean_over_microbatches(one, buffers, count)
        grads = {k: g.astype(params[k].dtype) for k, g in grads.items()}
        return grads, buffers, {**metrics, "tokens": tokens}

    def follow(
        self, inner: Inner, grads, buffers, metrics, trained=None
    ) -> tuple[Inner, dict[str, jax.Array]]:
        """Step along what `gradients` or `accumulated` gave, from which the state follows.

        Not where the gradient is not finite and `Setup.skip_nonfinite` holds.

        Args:
          trained: bool masks by leaf, what it trains (`trained` of one region); None = everything.
            Of the rest the gradient counts as 0, in its norm and in moments, too, and it stays
            where it is, whatever the optimizer does (weight decay).
        """
        grads = grads | {k: jnp.where(mask, grads[k], 0) for k, mask in (trained or {}).items()}
        metrics["grad_norm"] = gradient_norm(grads)
        tree = self.layout.tree(inner.params)
        told = {"value": metrics["loss"]} if self.gives_loss else {}
        updates, opt = self.setup.optimizer.update(self.layout.tree(grads), inner.opt, tree, **told)
        params = self.layout.select(optax.apply_updates(tree, updates), "train")
        params |= {
            k: jnp.where(mask, params[k], inner.params[k]) for k, mask in (trained or {}).items()
        }
        tokens = inner.tokens + metrics["tokens"]
        new = Inner(params, buffers, opt, inner.step + 1, tokens, inner.rounding)
        if not self.setup.skip_nonfinite:
            return new, metrics
        finite = jnp.isfinite(metrics["grad_norm"])
        metrics["skipped"] = 1.0 - finite.astype(jnp.float32)
        kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, inner)
        return dataclasses.replace(kept, step=new.step), metrics


def gradient_norm(grads: PyTree) -> jax.Array:
    """float32 scalar: the norm over all leaves, whose squares may not fit their own dtype."""
    wide = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), grads)
    return optax.tree.norm(wide).astype(jnp.float32)


def loss_and_aux(out: Any, reserved: Sequence[str] = ()) -> tuple[jax.Array, dict[str, Any]]:
    """The scalar loss, and the aux as a new dict, of what a `loss_fn` returned.

    Args:
      reserved: names that no aux may have, beside `RESERVED`.

    Raises:
      ValueError: it is neither a scalar nor (scalar, dict of scalars); `updates` may hold arrays.
        Or the aux has reserved names; the message lists all of them.
    """
    fix = "return a scalar loss, or (loss, dict of scalars)"
    if isinstance(out, tuple) and len(out) != 2:
        raise ValueError(f"loss_fn returned a tuple of {len(out)}: {fix}")
    loss, aux = out if isinstance(out, tuple) else (out, {})
    shape = _shape(loss)
    if shape is None or isinstance(loss, list):
        raise ValueError(f"loss_fn gave a {type(loss).__name__} as its loss: {fix}")
    if shape:
        raise ValueError(
            f"loss_fn gave a loss of shape {list(shape)}: give a scalar, as jnp.mean of it, alone "
            "or with a dict of scalars: (loss, aux)"
        )
    try:
        aux = dict(aux)
    except (TypeError, ValueError):
        kind = "an array" if isinstance(aux, jax.Array) else f"a {type(aux).__name__}"
        raise ValueError(f"loss_fn's aux is {kind}: {fix}") from None
    taken = [name for name in aux if name in RESERVED or name in reserved]
    if taken:
        raise ValueError(
            f"loss_fn's aux has {', '.join(map(repr, taken))}: a step's own metrics and rows have "
            f"these names; give others, as {'my_' + taken[0]!r}"
        )
    loss = jnp.asarray(loss)
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(f"loss_fn gave a loss of dtype {loss.dtype}: give a floating-point one")
    for name, value in aux.items():
        if name == UPDATES:
            if not isinstance(value, Mapping):
                kind = type(value).__name__
                raise ValueError(
                    f"loss_fn's aux[{name!r}] is a {kind}: give a dict, or leave it out"
                )
            continue
        shape = _shape(value)
        if shape is None:
            raise ValueError(
                f"loss_fn's aux[{name!r}] is a {type(value).__name__}: give a scalar, or leave it "
                "out"
            )
        if shape:
            raise ValueError(
                f"loss_fn's aux[{name!r}] has the shape {list(shape)}: mean it, or leave it out"
            )
    return loss, aux


def _shape(value: Any) -> tuple[int, ...] | None:
    """The shape of an array or a number; None of anything else."""
    if isinstance(value, jax.Array):
        return value.shape
    try:
        return jnp.asarray(value).shape
    except (TypeError, ValueError, OverflowError):
        return None


def mean_over_microbatches(
    one: Callable[[Any, PyTree], tuple[PyTree, jax.Array, PyTree]], buffers: PyTree, count
) -> tuple[PyTree, jax.Array, PyTree]:
    """Mean over microbatches 0 to count - 1, weighted by their tokens; sums in fp32.

    A microbatch without tokens counts for nothing, even when its values are not finite; without
    any tokens the mean is 0.

    Args:
      one: `(i, buffers) -> (float leaves, tokens, buffers)` of microbatch i, which gets the buffers
        of the one before.
      buffers: before microbatch 0.
      count: at least 1; may be traced.

    Returns:
      (fp32 means, float32 sum of tokens, buffers after the last).
    """

    def weighted(i, buffers):
        values, tokens, buffers = one(i, buffers)
        values = jax.tree.map(lambda x: x.astype(jnp.float32) * tokens, values)
        return jax.tree.map(lambda x: jnp.where(tokens > 0, x, 0.0), values), tokens, buffers

    def body(i, carry):
        sums, total, buffers = carry
        values, tokens, buffers = weighted(i, buffers)
        return jax.tree.map(jnp.add, sums, values), total + tokens, buffers

    like = jax.eval_shape(weighted, 0, buffers)[0]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    start = (zeros, jnp.float32(0), buffers)
    sums, total, buffers = jax.lax.fori_loop(0, count, body, start)
    share = jnp.where(total > 0, 1.0 / jnp.where(total > 0, total, 1.0), 0.0)
    return jax.tree.map(lambda x: x * share, sums), total, buffers


def keys_of_regions(seed: int, regions: Sequence[int] | np.ndarray) -> np.ndarray:
    """Words of the keys of these regions, uint32 `[R, W]`.

    Programs take them as an argument: with the seed as a constant of theirs, a run with another
    seed would find none of its programs compiled.
    """
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), np.asarray(regions))
    return np.asarray(jax.random.key_data(keys))


def step_key(key: jax.Array | np.ndarray, step: jax.Array | int) -> jax.Array:
    """Key of a region's inner step, 0-based; `key` are the words of the region."""
    return jax.random.fold_in(jax.random.wrap_key_data(key), step)


def part_key(rng: jax.Array, part: jax.Array) -> jax.Array:
    """Key of one of several microbatches of a step."""
    return jax.random.fold_in(rng, part)


def _metrics(loss, aux, batch) -> dict[str, jax.Array]:
    """fp32 scalars; without a `tokens` aux a sample counts as one token."""
    samples = jax.tree.leaves(batch)[0].shape[0]
    aux = {k: jnp.asarray(v).astype(jnp.float32) for k, v in aux.items()}
    return {"tokens": jnp.float32(samples), **aux, "loss": loss.astype(jnp.float32)}


def _named_updates(updates: dict[str, jax.Array], buffers: dict[str, jax.Array]):
    unknown = sorted(set(updates) - set(buffers))
    if unknown:
        raise ValueError(
            f"aux[{UPDATES!r}] holds {unknown}, which are not leaves of role 'local' or 'average' "
            f"(those are {sorted(buffers)}): name them by their path, e.g. 'norm/mean'"
        )
    return {k: v.astype(buffers[k].dtype) for k, v in updates.items()}


class InnerBlock(NamedTuple):
    """The parts of the inner phase's program (`inner_block`).

    Attributes:
      empty: `(inner, frozen, batches, region_keys, active, stride=None) -> log`: metrics `[R, S]`,
        all 0.
      steps: `((inner, log), frozen, batches, region_keys, active, first, end, stride=None) ->
        (inner, log)`.
    """

    empty: Callable
    steps: Callable


def inner_block(step: InnerStep, regions: Regions) -> InnerBlock:
    """Inner steps of all regions, in parts that other work may run beside.

    Arguments as in `make_inner_program`.
    """

    # Traced once, for the log's names and in the loop: there t must be of the same kind, a number
    # of the body's own. The program is as without the inner jit.
    @functools.partial(jax.jit, inline=True)
    def region_step(inner, key, batches, frozen, trained, active, t, stride):
        def batch(i):
            return jax.tree.map(lambda x: x[i], batches)

        given, rng = (inner.params, inner.buffers, frozen), step_key(key, inner.step)
        if stride is None:
            found = step.gradients(*given, batch(t), rng)
        else:
            first = t * stride
            found = step.accumulated(*given, lambda i: batch(first + i), stride, rng)
        new, metrics = step.follow(inner, *found, trained)
        return where_active(None if active is None else active[t], new, inner, metrics)

    def first_step(inner, frozen, batches, key, active, stride, trained):
        return region_step(inner, key, batches, frozen, trained, active, 0, stride)

    def region_block(carry, frozen, batches, key, active, stride, first, end, trained):
        def body(t, carry):
            inner, log = carry
            inner, new = region_step(inner, key, batches, frozen, trained, active, t, stride)
            return inner, jax.tree.map(lambda buffer, v: buffer.at[t].set(v), log, new)

        return jax.lax.fori_loop(0 if first is None else first, end, body, carry)

    lifted_step = regions.lift(first_step, (0, None, 0, 0, 0, None, 0), callbacks=False)
    lifted_block = regions.lift_update(region_block, (0, None, 0, 0, 0, None, None, None, 0))
    trained = dict(step.trained) or None

    def empty(inner, frozen, batches, region_keys, active, stride=None):
        given = (inner, frozen, batches, region_keys, active, stride, trained)
        shapes = jax.eval_shape(lifted_step, *given)[1]
        return empty_log(shapes, jax.tree.leaves(batches)[0].shape[1])

    def steps(carry, frozen, batches, region_keys, active, first, end, stride=None):
        given = (frozen, batches, region_keys, active, stride, first, end, trained)
        return lifted_block(carry, *given)

    return InnerBlock(empty, steps)


def make_inner_program(step: InnerStep, regions: Regions):
    """Build the program of the inner phase, not yet jitted.

    Returns:
      `block(inner, frozen, batches, region_keys, active, n, stride, single)`, which runs the first
      n of S staged steps in every region; n is traced, so that its value never recompiles. Steps
      taken one by one and in blocks are bit-identical.

      - `batches`: leaves `[R, S, b, ...]`; `active`: None or bool `[R, S]`, the regions that make a
        step.
      - `stride`: None, or of steps of several microbatches each, traced: `batches` are then a
        staged buffer of S microbatches, and step t takes t stride to (t + 1) stride - 1. A batch
        that grows recompiles nothing; only another microbatch size makes another program.
      - Its result: (inner, metrics `[R, S]` by step, or `[R]` with the static `single`, S = 1).
    """
    parts = inner_block(step, regions)

    def block(inner, frozen, batches, region_keys, active, n, stride=None, single=False):
        given = (frozen, batches, region_keys, active)
        log = parts.empty(inner, *given, stride)
        inner, log = parts.steps((inner, log), *given, None, n, stride)
        return inner, squeeze(log) if single else log

    return block


def where_active(active: jax.Array | None, new: Inner, old: Inner, metrics: dict[str, jax.Array]):
    """The new state and metrics; of a region that is not active, the old state and no tokens."""
    if active is None:
        return new, metrics
    tokens = jnp.where(active, metrics["tokens"], 0.0)
    kept = jax.tree.map(lambda a, b: jnp.where(active, a, b), new, old)
    return kept, {**metrics, "tokens": tokens}


def squeeze(log: PyTree) -> PyTree:
    """Metrics `[R]` of the first step of a block."""
    return jax.tree.map(lambda x: x[:, 0], log)


def empty_log(shapes: PyTree, steps: int) -> PyTree:
    """Zeros `[R, steps]` for metrics of shape `[R]`."""
    return jax.tree.map(lambda s: jnp.zeros((s.shape[0], steps), s.dtype), shapes)
