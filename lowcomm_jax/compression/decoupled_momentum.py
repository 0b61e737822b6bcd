r"""Decoupled momentum: regions send a part of their momentum, and put its mean back in its place.

$$m_r \leftarrow \beta m_r + \Delta_r, \qquad \text{send } C(m_r), \qquad
  m_r \leftarrow m_r - D(C(m_r)) + q, \qquad q = \mathrm{mean}_r\, D(C(m_r))$$

The outer rule gets $\Delta_r + \beta m_r$, Nesterov's look-ahead. It holds the region's own
$\Delta_r$, not averaged, so that the regions' anchors differ.

| symbol | meaning |
| --- | --- |
| $\Delta_r$ | pseudo-gradient of region r, unscaled; kept until the mean is there |
| $m_r$ | momentum of region r, fp32, starts at zero |
| $\beta$ | `decay` |

Source: the authors' code of arXiv 2510.03371. For one region this is Nesterov momentum with every
codec.

Differs from the code: learning rates stay outside. A region that sends nothing has no $\Delta_r$ in
this round: its momentum does not decay, and it adds $q$ like all others.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lowcomm_jax.compression.base import Codec, Wrapper, memory_problem
from lowcomm_jax.compression.error_feedback import ErrorFeedback, ErrorFeedbackState
from lowcomm_jax.refused import in_range, refuse

PyTree = Any


class DecoupledMomentumState(NamedTuple):
    """Momentum, the residual of `error_feedback`, and the last pseudo-gradient, both fp32."""

    feedback: ErrorFeedbackState
    own: PyTree


@dataclasses.dataclass(frozen=True)
class DecoupledMomentum(Wrapper):
    """See `decoupled_momentum`."""

    decay: float = 0.95
    personal = True
    elementwise = True

    def __post_init__(self) -> None:
        wrong = [in_range("decay", self.decay, 0.0, 1.0, open_high=True)]
        refuse("decoupled_momentum", [*wrong, memory_problem(self.codec)])

    @property
    def name(self) -> str:
        return f"{self.codec.name}_dm"

    def init(self, like: PyTree) -> PyTree:
        feedback = ErrorFeedback(self.codec, self.decay).init(like)
        return DecoupledMomentumState(feedback, jax.tree.map(jnp.zeros_like, feedback.residual))

    def encode(self, tree: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        # Before the mean comes back, this is error feedback.
        encode = ErrorFeedback(self.codec, self.decay).encode
        payload, feedback = encode(tree, state.feedback, params)
        own = jax.tree.map(lambda x: x.astype(jnp.float32), tree)
        return payload, DecoupledMomentumState(feedback, own)

    def receive(self, mean: PyTree, state: PyTree, sent: jax.Array) -> tuple[PyTree, PyTree]:
        momentum = jax.tree.map(jnp.add, state.feedback.residual, mean)
        direction = jax.tree.map(
            lambda x, m: jnp.where(sent, x, 0.0) + self.decay * m, state.own, momentum
        )
        return direction, state._replace(feedback=state.feedback._replace(residual=momentum))


def decoupled_momentum(codec: Codec, decay: float = 0.95) -> DecoupledMomentum:
    """Give a codec a momentum, whose sent part is averaged over the regions (see the module).

    Args:
      codec: any codec but EF21 and this one; its payload and bytes stay as they are.
      decay: beta in [0, 1).

    Raises:
      ValueError: decay outside [0, 1), or such a codec.

    >>> from lowcomm_jax.compression import make
    >>> x = jnp.array([1.0, -4.0, 2.0])
    >>> codec = decoupled_momentum(make("topk", k=1), decay=0.5)
    >>> payload, state = codec.encode(x, codec.init(x))
    >>> mean = jnp.array([0.0, -3.0, 0.0])  # with another region's -2
    >>> codec.receive(mean, state, jnp.bool_(True))[0]  # x + 0.5 [1, -3, 2]
    Array([ 1.5, -5.5,  3. ], dtype=float32)
    """
    return DecoupledMomentum(codec, decay)
