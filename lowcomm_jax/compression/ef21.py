r"""EF21: send the compressed difference to the copy that the receivers hold.

$$c_r = C(\Delta_r - h_r), \qquad h_r \leftarrow h_r + D(c_r), \qquad
  \bar h \leftarrow \bar h + \mathrm{mean}_r\, D(c_r)$$

| symbol | meaning |
| --- | --- |
| $h_r$ | the receivers' copy of region r's pseudo-gradient, fp32; state of the codec |
| $\bar h$ | mean of the copies; state of `integrate`, the direction the outer rule descends along |

Payloads decode to *increments*: chain `integrate()` before the outer rule. The mean is over all
regions, with equal weights. The copy of an absent region stays as it is, and so does its share in
the running mean, which is therefore exact whichever regions take part. An absent region's old
direction keeps its share of the mean.

Four uses are refused. The mean over another number of regions is another sum, so that a run may
not go on with more or fewer of them. Between jobs a region that comes back after a loss would start
from a copy of 0. A codec that averages over the senders of an entry (`mean="senders"`) gives no
mean over all regions. A codec that reads the weights would compare them with changes of a copy.

Source: arXiv 2106.05203, Algorithm 2.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lowcomm_jax.compression.base import Codec, Wrapper, memory_problem
from lowcomm_jax.compression.leaf import InUnits
from lowcomm_jax.compression.means import as_rounded
from lowcomm_jax.compression.units import UnitCodec
from lowcomm_jax.refused import refuse

PyTree = Any


class EF21State(NamedTuple):
    """The receivers' copy h (fp32, shapes of the tree) and the wrapped codec's own state."""

    copy: PyTree
    codec: PyTree


@dataclasses.dataclass(frozen=True)
class EF21(Wrapper):
    """See `ef21`; a mean that is encoded again would lose track of the copies."""

    elementwise = True

    def __post_init__(self) -> None:
        problem = memory_problem(self.codec)
        if self.codec.reads_params:
            problem = (
                f"codec {self.codec.name} compares changes with the weights, and changes of a copy "
                "are none of theirs: use error_feedback"
            )
        refuse("ef21", [problem])

    @property
    def increments(self) -> bool:
        return True

    @property
    def name(self) -> str:
        return f"{self.codec.name}_ef21"

    def init(self, like: PyTree) -> PyTree:
        copy = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), like)
        return EF21State(copy, self.codec.init(like))

    def _change(self, tree: PyTree, state: EF21State) -> PyTree:
        return jax.tree.map(lambda x, h: x.astype(jnp.float32) - h, tree, state.copy)

    def encode(self, tree: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        del params
        change = self._change(tree, state)
        payload, inner = self.codec.encode(change, state.codec)
        # As in error feedback: add the very bits that receivers decode.
        received = as_rounded(self.codec.decode(payload, change))
        return payload, EF21State(jax.tree.map(jnp.add, state.copy, received), inner)

    def aggregate(self, payload_R: PyTree, weight_R: jax.Array, like: PyTree) -> PyTree:
        """The increment of the mean over all regions; weights are 1, or 0 of those left out."""
        mean = self.codec.aggregate(payload_R, weight_R, like)
        share = jnp.sum(weight_R) / weight_R.shape[0]
        return jax.tree.map(lambda x: x * share, mean)


def ef21(codec: Codec) -> EF21:
    """Let a codec send differences; chain `integrate()` before the outer rule (see the module).

    Raises:
      ValueError: the codec is EF21 itself, or decoupled momentum, or reads the weights.
    """
    return EF21(codec)


def averages_senders(part: Any) -> bool:
    """Whether a codec, or one that it holds, averages an entry over those who sent it."""
    if isinstance(part, UnitCodec):
        return InUnits(part).averages_senders
    if isinstance(part, tuple):
        return any(map(averages_senders, part))
    if not dataclasses.is_dataclass(part):
        return False
    return any(averages_senders(getattr(part, field.name)) for field in dataclasses.fields(part))


class IntegrateState(NamedTuple):
    """The running sum, fp32."""

    total: PyTree


def integrate() -> optax.GradientTransformationExtraArgs:
    """Running sum of the updates, fp32: turns EF21's mean increments into the mean copy.

    >>> rule = integrate()
    >>> state = rule.init(jnp.zeros(2))
    >>> _, state = rule.update(jnp.array([1.0, 2.0]), state)
    >>> rule.update(jnp.array([0.5, -2.0]), state)[0]
    Array([1.5, 0. ], dtype=float32)
    """

    def init(params):
        return IntegrateState(jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params))

    def update(updates, state, params=None, **extra):
        del params, extra
        total = jax.tree.map(lambda h, c: h + c.astype(jnp.float32), state.total, updates)
        return total, IntegrateState(total)

    return optax.GradientTransformationExtraArgs(init, update)


def integrates(outer_state: PyTree) -> bool:
    """Whether the state of an outer rule is that of one with `integrate()` in it."""
    nodes = jax.tree.leaves(outer_state, is_leaf=lambda x: isinstance(x, IntegrateState))
    return any(isinstance(node, IntegrateState) for node in nodes)
