"""The two compiled programs of a fragment's round trip: send and land."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from lowcomm_jax import fragments as fragmentation
from lowcomm_jax.exchange import MeshExchange
from lowcomm_jax.methods.base import Method
from lowcomm_jax.regions import Regions

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Guard:
    """Which contributions are left out of a mean, and how far an anchor may move.

    Contributions that are not finite are always left out.

    Attributes:
      outlier_factor: leave out a region whose pseudo-gradient norm exceeds this multiple of the
        median over regions; None = off.
      max_update_norm: clip the outer update to this global norm per fragment; None = off.
    """

    outlier_factor: float | None = None
    max_update_norm: float | None = None

    def violations(self) -> list[str]:
        problems = []
        if self.outlier_factor is not None and self.outlier_factor <= 1:
            problems.append(f"outlier_factor={self.outlier_factor}: must exceed 1")
        if self.max_update_norm is not None and self.max_update_norm <= 0:
            problems.append(f"max_update_norm={self.max_update_norm}: must be positive")
        return problems


def _norm_R(tree_R: dict[str, jax.Array]) -> jax.Array:
    """L2 norm over all leaves behind the leading axis, fp32 `[R]`."""
    # No reshape: it would gather leaves that are sharded inside a region.
    squares = [jnp.sum(jnp.square(x), axis=tuple(range(1, x.ndim))) for x in tree_R.values()]
    return jnp.sqrt(sum(squares))


def select(mask_R: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Per region: `new` where the mask holds, else `old`."""

    def pick(a, b):
        return jnp.where(mask_R.reshape(-1, *(1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(pick, new, old)


def _like(tree_R: PyTree) -> PyTree:
    """Shapes of one region behind the leading axis."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree_R)


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Send and land of one fragment, as pure functions to be jitted by the engine.

    Attributes:
      specs: leaf name -> PartitionSpec without the region or anchor axis.
    """

    regions: Regions
    exchange: MeshExchange
    method: Method
    guard: Guard
    specs: dict[str, P]

    # -- send ---------------------------------------------------------------------------------

    def send(self, params, anchor, codec_state, rows, takes_part_R, weight_R, *, keep: bool):
        """Encode every region's pseudo-gradient Delta = Theta - theta of one fragment.

        Args:
          params, anchor: the leaves the fragment touches, `[R, ...]` and `[A, ...]`, uncut.
          codec_state: residuals `[R, ...]`.
          rows: row numbers of sliced leaves.
          takes_part_R: bool `[R]`; an absent region's residual stays as it is.
          weight_R: float32 `[R]`, weight of each region if it takes part.
          keep: whether the landing needs the local values of this moment.

        Returns:
          dict with payload, codec_state, snapshot (None unless `keep`), weight (0 for regions
          that are absent or left out), delta_norm `[R]`, left_out `[R]`.
        """
        theta = fragmentation.take(params, rows)
        base = fragmentation.take(anchor, rows)
        delta = {k: base[k] - theta[k].astype(jnp.float32) for k in theta}
        sent = self.encode(delta, codec_state, takes_part_R, weight_R)
        return {**sent, "snapshot": theta if keep else None}

    def encode(self, delta, codec_state, takes_part_R, weight_R):
        """Weigh and encode what every region hands over, fp32 leaves `[R, ...]`; see `send`."""
        norm_R = _norm_R(delta)
        weight = jnp.where(takes_part_R & self._acceptable(norm_R, takes_part_R), weight_R, 0.0)
        payload, new_state = delta, codec_state
        if self.exchange.codec is not None:
            encode = self.regions.lift(self.exchange.codec.encode, (0, 0))
            payload, new_state = encode(delta, codec_state)
            new_state = select(weight > 0, new_state, codec_state)
        return {
            "payload": payload,
            "codec_state": new_state,
            "weight": weight,
            "delta_norm": norm_R,
            "left_out": takes_part_R & (weight == 0),
        }

    def _acceptable(self, norm_R, takes_part_R):
        finite = jnp.isfinite(norm_R)
        if self.guard.outlier_factor is None:
            return finite
        counted = jnp.where(takes_part_R & finite, norm_R, jnp.nan)
        return finite & (norm_R <= self.guard.outlier_factor * jnp.nanmedian(counted))

    # -- land ---------------------------------------------------------------------------------

    def move(self, anchor, outer_state, payload, weight_R, rows, own=None):
        """Step 1 of a landing: Theta <- Theta + outer(mean Delta).

        Args:
          anchor: uncut leaves `[A, ...]`.
          outer_state: the fragment's outer state, leaves `[A, ...]`.
          payload: leaves `[R, ...]`; weight_R: float32 `[R]`.
          own: for methods with an anchor per region, extra arguments of the outer rule with
            leaves `[R, ...]`.

        Returns:
          (anchor, outer_state, metrics): unchanged when all weights are 0 and `own` is None.
        """
        base = fragmentation.take(anchor, rows)
        like = _like(base)
        mean = self.exchange.mean(payload, weight_R, like, {k: self.specs[k] for k in like})
        updates, new_state = self._outer(mean, outer_state, base, own)
        update_norm = _norm_R(updates)
        if self.guard.max_update_norm is not None:
            clip = jnp.minimum(1.0, self.guard.max_update_norm / jnp.maximum(update_norm, 1e-30))
            updates = jax.tree.map(lambda u: u * clip.reshape(-1, *(1,) * (u.ndim - 1)), updates)
        moves = (jnp.sum(weight_R) > 0) if own is None else jnp.bool_(True)
        moved = jax.tree.map(lambda b, u: jnp.where(moves, b + u, b), base, updates)
        new_state = jax.tree.map(lambda n, o: jnp.where(moves, n, o), new_state, outer_state)
        metrics = {"mean_norm": _norm_R(mean), "update_norm": jnp.where(moves, update_norm, 0.0)}
        return fragmentation.put(anchor, rows, moved), new_state, metrics

    def _outer(self, mean, outer_state, base, own):
        if own is None:
            return jax.vmap(self.method.outer.update)(mean, outer_state, base)
        shared = jax.tree.map(lambda x: x[0], mean)
        own = {**own, **{k: self._decode(own[k], base) for k in ("own", "own_late")}}

        def one_region(state, params, extra):
            return self.method.outer.update(shared, state, params, **extra)

        return jax.vmap(one_region)(outer_state, base, own)

    def step_optimizer(self, step, anchor, opt_state, sent):
        """Let the inner optimizer move the shared anchor along the mean gradient.

        Returns:
          (anchor, opt_state, metrics): unchanged when nobody took part.
        """
        like = _like(anchor)
        mean = self.exchange.mean(sent["payload"], sent["weight"], like, self.specs)
        moves = jnp.sum(sent["weight"]) > 0
        tree = step.layout.tree

        def one(grads, state, params):
            return step.optimizer.update(tree(grads), state, tree(params))

        updates, new_state = jax.vmap(one)(mean, opt_state, anchor)
        updates = step.layout.select(updates, "train")
        regions = sent["weight"].shape
        norm = jnp.broadcast_to(jnp.where(moves, _norm_R(updates), 0.0), regions)
        moved = {k: jnp.where(moves, anchor[k] + updates[k], anchor[k]) for k in anchor}
        new_state = jax.tree.map(lambda n, o: jnp.where(moves, n, o), new_state, opt_state)
        return moved, new_state, {"update_norm": norm}

    def _decode(self, payload_R, base):
        """What every region's payload decodes to, fp32 leaves `[R, ...]`."""
        if self.exchange.codec is None:
            return payload_R
        like = _like(base)
        return self.regions.lift(lambda one: self.exchange.codec.decode(one, like), (0,))(payload_R)

    def adopt(
        self, params, anchor, landing_state, snapshot, weight_R, lands_R, staleness_R, rows, step
    ):
        """Step 2 of a landing: theta <- Theta' + T(theta - s; Theta' - s, tau) where `lands_R`.

        `step` (int32, inner steps done) is handed to the landing rule, for schedules of the inner
        learning rate. A region whose contribution was left out adopts Theta' itself: what made it
        an outlier is not replayed.

        Returns:
          (params, landing_state).
        """
        theta = fragmentation.take(params, rows)
        target = fragmentation.take(anchor, rows)
        shape = {k: (theta[k].shape[0], *target[k].shape[1:]) for k in theta}
        adopted = {k: jnp.broadcast_to(target[k], shape[k]) for k in theta}
        if self.method.landing is not None:
            origin = theta if snapshot is None else snapshot
            shared = next(iter(target.values())).shape[0] == 1 and self.regions.count > 1
            arguments = jax.tree.map(lambda x: x[0], target) if shared else target
            landed, new_state = self.regions.lift(
                self._land_one, (0, 0, None if shared else 0, 0, 0, None)
            )(theta, origin, arguments, landing_state, staleness_R, step)
            adopted = select(weight_R > 0, landed, adopted)
            landing_state = select(lands_R & (weight_R > 0), new_state, landing_state)
        adopted = {k: adopted[k].astype(theta[k].dtype) for k in theta}
        new = select(lands_R, adopted, theta)
        return fragmentation.put(params, rows, new), landing_state

    def _land_one(self, theta, origin, target, state, staleness, step):
        """One region's landing rule; fp32 inside."""
        origin = {k: x.astype(jnp.float32) for k, x in origin.items()}
        progress = {k: theta[k].astype(jnp.float32) - origin[k] for k in theta}
        displacement = {k: target[k] - origin[k] for k in theta}
        correction, state = self.method.landing.update(
            progress, state, target, displacement=displacement, staleness=staleness, step=step
        )
        return optax.apply_updates(target, correction), state

    def receive(self, received, anchor, lands_R):
        """Note the anchor that the regions of `lands_R` have just received."""
        spread = {k: jnp.broadcast_to(anchor[k], x.shape) for k, x in received.items()}
        return select(lands_R, spread, received)

    def average_buffers(self, buffers, takes_part_R):
        """Average non-trainable float leaves over the participants; the others keep theirs."""
        specs = {name: P() for name in buffers}
        mean = self.regions.mean(buffers, takes_part_R.astype(jnp.float32), specs)
        spread = {k: jnp.broadcast_to(mean[k], x.shape).astype(x.dtype) for k, x in buffers.items()}
        return select(takes_part_R, spread, buffers)
