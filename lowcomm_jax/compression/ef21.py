r"""EF21: send the compressed difference to what the receivers already hold.

$$c_r = C(\Delta_r - h_r), \qquad h_r \leftarrow h_r + D(c_r), \qquad
  \bar h \leftarrow \bar h + \mathrm{mean}_r\, D(c_r)$$

| symbol | meaning |
| --- | --- |
| $h_r$ | the receivers' copy of region r's pseudo-gradient, fp32; state of the codec |
| $\bar h$ | mean of the copies; state of `integrate`, the direction the outer rule descends along |

Payloads decode to *increments*: chain `integrate()` before the outer rule. The running mean is
exact as long as the same regions take part in every round (an increment that only part of the
regions sent is averaged over that part, and the two sides drift apart).

Source: arXiv 2106.05203, Algorithm 2.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lowcomm_jax.compression.base import Codec, Wrapper

PyTree = Any


class EF21State(NamedTuple):
    """The receivers' copy h (fp32, shapes of the tree) and the wrapped codec's own state."""

    copy: PyTree
    codec: PyTree


@dataclasses.dataclass(frozen=True)
class EF21(Wrapper):
    """See `ef21`."""

    @property
    def name(self) -> str:
        return f"{self.codec.name}_ef21"

    def init(self, like):
        copy = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), like)
        return EF21State(copy, self.codec.init(like))

    def encode(self, tree, state):
        change = jax.tree.map(lambda x, h: x.astype(jnp.float32) - h, tree, state.copy)
        payload, inner = self.codec.encode(change, state.codec)
        # As in error feedback: add the very bits that receivers decode.
        received = jax.lax.optimization_barrier(self.codec.decode(payload, change))
        return payload, EF21State(jax.tree.map(jnp.add, state.copy, received), inner)


def ef21(codec: Codec) -> EF21:
    """Let a codec send differences; chain `integrate()` before the outer rule (see the module)."""
    return EF21(codec)


def integrate() -> optax.GradientTransformationExtraArgs:
    """Running sum of the updates, fp32: turns EF21's mean increments into the mean copy.

    >>> rule = integrate()
    >>> state = rule.init(jnp.zeros(2))
    >>> _, state = rule.update(jnp.array([1.0, 2.0]), state)
    >>> rule.update(jnp.array([0.5, -2.0]), state)[0]
    Array([1.5, 0. ], dtype=float32)
    """

    def init(params):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)

    def update(updates, state, params=None, **extra):
        del params, extra
        total = jax.tree.map(lambda h, c: h + c.astype(jnp.float32), state, updates)
        return total, total

    return optax.GradientTransformationExtraArgs(init, update)
