"""The 1F1B schedule: a stage goes back through a microbatch as soon as it can, so few are kept.

`OneFOneB` gives the loss and gradients of M microbatches, from within one stage.

Source: PipeDream-Flush, arXiv 2006.09503, section 2.2 (the schedule of Megatron-LM).

Differs from the source: every device runs the same program, so that in a tick all stages go forward
through one microbatch and back through another. Stage s goes forward through microbatch m in tick
m + s and back in tick m + 2 (S - 1) - s. At most 2 S - 1 inputs of a stage are kept, where the
source keeps S and GPipe M. In the first S - 1 ticks no stage computes backward, and in the last
S - 1 none forward. These ticks are programs of their own, so that the bubble is GPipe's. A stage
keeps only its inputs, and repeats the forward pass before the backward pass.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lowcomm_jax.mesh.stages import hand_back, index, pass_on

PyTree = Any


class Carry(NamedTuple):
    """The values that one tick passes to the next.

    Attributes:
      ahead: activations that the stage before has just passed on.
      behind: gradient that the next stage has just passed back.
      kept: inputs of this stage, `[2 S - 1, ...]`; that of tick t lies at t mod (2 S - 1).
      grads: fp32, like the parameters.
      sums: sums of the results of `leave` so far.
    """

    ahead: jax.Array
    behind: jax.Array
    kept: jax.Array
    grads: PyTree
    sums: PyTree


@dataclasses.dataclass(frozen=True)
class OneFOneB:
    """Loss and gradients of M microbatches, from within one of S stages.

    All functions see the stage's own part of the parameters. `enter` and `leave` are the work of
    all stages together and may sum over them; `apply` is this stage's alone.

    Attributes:
      enter: (params, m) -> input of the first stage for microbatch m, the same in all stages.
      apply: (params, x) -> values of x's shape and dtype: this stage's layers.
      leave: (params, y, m) -> (loss, aux) of microbatch m, the same in all stages, from the last
        stage's y; the others' y must not matter.
      stages, microbatches: S and M.
    """

    enter: Callable[[PyTree, jax.Array], jax.Array]
    apply: Callable[[PyTree, jax.Array], jax.Array]
    leave: Callable[[PyTree, jax.Array, jax.Array], tuple[jax.Array, PyTree]]
    stages: int
    microbatches: int

    def __call__(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Returns ((loss, aux) summed over microbatches, gradients of the loss).

        Gradients of leaves that every stage has whole are this stage's share: sum them.
        """
        lead = self.stages - 1
        carry = self._start(params)
        for first, last, forward, back in (
            (0, lead, True, False),
            (lead, lead + self.microbatches, True, True),
            (lead + self.microbatches, 2 * lead + self.microbatches, False, True),
        ):
            if first < last:
                tick = functools.partial(self._tick, params, forward=forward, back=back)
                carry = jax.lax.scan(tick, carry, jnp.arange(first, last))[0]
        return carry.sums, carry.grads

    def _start(self, params: PyTree) -> Carry:
        x = jax.eval_shape(self.enter, params, jnp.int32(0))
        zeros = functools.partial(jnp.zeros, x.shape, x.dtype)
        sums = jax.eval_shape(self.leave, params, x, jnp.int32(0))
        return Carry(
            zeros(),
            zeros(),
            jnp.zeros((2 * self.stages - 1, *x.shape), x.dtype),
            jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params),
            jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sums),
        )

    def _tick(self, params: PyTree, carry: Carry, t: jax.Array, *, forward: bool, back: bool):
        slots, gradient = 2 * self.stages - 1, carry.behind
        if forward:
            fed = self.enter(params, jnp.minimum(t, self.microbatches - 1))
            x = jnp.where(index() == 0, fed, carry.ahead)
            y = self.apply(params, x)
            kept = jax.lax.dynamic_update_index_in_dim(carry.kept, x, t % slots, 0)
            carry = carry._replace(ahead=pass_on(y, self.stages), kept=kept)
            if back:
                carry, last = self._leave(params, carry, y, t - (self.stages - 1))
                gradient = jnp.where(index() == self.stages - 1, last, gradient)
        if back:
            carry = self._back(params, carry, gradient, t)
        return carry, None

    def _leave(self, params: PyTree, carry: Carry, y: jax.Array, m: jax.Array):
        """Add the loss of microbatch m; returns the gradient of y in the last stage besides."""
        sums, pull = jax.vjp(lambda p, y: self.leave(p, y, m), params, y)
        # The same loss in all stages: its gradient is shared among them.
        seeds = jax.tree.map(jnp.zeros_like, sums)
        grads, last = pull((jnp.full_like(sums[0], 1 / self.stages), *seeds[1:]))
        added = jax.tree.map(jnp.add, carry.sums, sums)
        return carry._replace(sums=added, grads=_plus(carry.grads, grads)), last

    def _back(self, params: PyTree, carry: Carry, gradient: jax.Array, t: jax.Array) -> Carry:
        """Go back through the microbatch whose turn it is, if it is one's."""
        ago = 2 * (self.stages - 1 - index())
        own = t - 2 * (self.stages - 1) + index()
        gradient = jnp.where((own >= 0) & (own < self.microbatches), gradient, 0)
        x = carry.kept[(t - ago) % (2 * self.stages - 1)]
        grads, before = jax.vjp(self.apply, params, x)[1](gradient)
        grads = _plus(carry.grads, grads)
        entered = jnp.clip(t - 2 * (self.stages - 1), 0, self.microbatches - 1)
        pull = jax.vjp(lambda p: self.enter(p, entered), params)[1]
        (first,) = pull(jnp.where(index() == 0, before, 0))
        return carry._replace(behind=hand_back(before, self.stages), grads=_plus(grads, first))


def _plus(grads: PyTree, more: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), grads, more)
