"""The contract of a merge rule, and how it is applied to a fragment's leaves.

A rule is written for one tensor. `merge_leaves` hands it every leaf of a fragment as a whole: each
layer of a stacked leaf by itself, with the kind of leaf (`optimizers.kind_of`).
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from lowcomm_jax.optimizers import Kind, kind_of
from lowcomm_jax.params.fragments import is_stacked

PyTree = Any


class Merge(abc.ABC):
    """How the payloads of those who took part become one direction.

    A rule is a frozen dataclass of its settings, so that checkpoints can describe it.

    Attributes:
      reads: `payloads` or `mean`. With `payloads` the rule needs them one by one, so that every
        region receives those of all others. With `mean` it needs only their weighted mean; the
        bytes are then those of a method without a rule.
      momentum: name of the entry of the outer state (such as `trace` of `optax.sgd`) that the rule
        reads; None = none.
    """

    reads: ClassVar[Literal["payloads", "mean"]] = "payloads"
    momentum: ClassVar[str | None] = None

    def violations(self) -> list[str]:
        """Settings that cannot work, one line with its fix each."""
        return []

    @abc.abstractmethod
    def tensor(
        self, delta_RxN: jax.Array, weight_R: jax.Array, kind: Kind, momentum: jax.Array | None
    ) -> jax.Array:
        """The direction of one tensor (traced).

        Args:
          delta_RxN: fp32 `[R, ...]`, decoded pseudo-gradients, 0 where the weight is 0; where the
            rule `reads` the mean, `[1, ...]`, the mean.
          weight_R: float32 `[R]`, not negative, not normalised, 0 for regions that are not counted.
            Where no region is counted all are 0, and the loop drops the result.
          kind: `matrix`, `embedding`, `head` or `vector`.
          momentum: fp32 `[...]`, from the outer state before this round; None unless the rule
            names its entry.

        Returns:
          The direction, fp32 `[...]`.
        """


def merge_leaves(
    rule: Merge,
    delta_R: dict[str, jax.Array],
    weight_R: jax.Array,
    momentum: dict[str, jax.Array] | None,
    stacked: Sequence[str],
) -> dict[str, jax.Array]:
    """Apply a rule to every tensor of a fragment (traced).

    Args:
      rule: to apply.
      delta_R: fp32 leaves `[R, ...]` by name; `[1, ...]` where the rule reads the mean.
      weight_R: float32 `[R]`.
      momentum: leaves `[...]` by name, or None.
      stacked: path prefixes of leaves with a leading layer axis; each layer is a tensor.

    Returns:
      fp32 leaves `[...]` by name.
    """

    def one(name: str, x_RxN: jax.Array) -> jax.Array:
        kind = kind_of(name, jax.ShapeDtypeStruct(x_RxN.shape[1:], x_RxN.dtype), stacked)
        counts = (weight_R > 0).reshape(-1, *(1,) * (x_RxN.ndim - 1))
        silenced = jnp.where(counts, x_RxN, 0.0)
        old = None if momentum is None else momentum[name]

        def tensor(x, m):
            return rule.tensor(x, weight_R, kind, m)

        if is_stacked(name, stacked):
            return jax.vmap(tensor, in_axes=(1, None if old is None else 0))(silenced, old)
        return tensor(silenced, old)

    return {name: one(name, x) for name, x in delta_R.items()}


def share(weight_R: jax.Array, ndim: int) -> jax.Array:
    """Weights normalised to a sum of 1, shaped to multiply `[R, ...]` of `ndim` axes."""
    total = jnp.sum(weight_R)
    shares = weight_R / jnp.where(total > 0, total, 1.0)
    return shares.reshape(-1, *(1,) * (ndim - 1))


def norm(x: jax.Array) -> jax.Array:
    """L2 norm of a whole tensor, fp32 `[]`; without a reshape, which would gather a sharded one."""
    return jnp.sqrt(jnp.sum(jnp.square(x)))
