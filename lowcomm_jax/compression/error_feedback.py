r"""Error feedback: the values that a codec loses are added to those it encodes next.

$$p = \Delta + \beta e, \qquad \text{send } C(p), \qquad e \leftarrow p - D(C(p))$$

| symbol | meaning |
| --- | --- |
| $\Delta$ | values to encode, unscaled: no learning rate enters the residual |
| $e$ | residual, fp32, per region, starts at zero |
| $\beta$ | `decay`: 1 loses nothing; 0.9 to 0.95 forgets slowly |

Source: EF-SGD, arXiv 1901.09847 (beta = 1); SparseLoCo, arXiv 2508.15706, and MuLoCo, 2505.23725
(beta = 0.95).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from lowcomm_jax.compression.base import Codec, Wrapper, memory_problem
from lowcomm_jax.refused import in_range, is_number, refuse

PyTree = Any


class ErrorFeedbackState(NamedTuple):
    """Residual (fp32, shapes of the tree) and the wrapped codec's own state."""

    residual: PyTree
    codec: PyTree


@dataclasses.dataclass(frozen=True)
class ErrorFeedback(Wrapper):
    """See `error_feedback`."""

    keeps_residual: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True
    decay: float = 1.0

    def __post_init__(self) -> None:
        wrong = None if is_number(self.decay) else f"decay={self.decay!r}: give a number in [0, 1]"
        wrong = wrong or in_range("decay", self.decay, 0.0, 1.0)
        refuse("error_feedback", [wrong, memory_problem(self.codec)])

    @property
    def name(self) -> str:
        return f"{self.codec.name}_ef"

    def init(self, like: PyTree) -> PyTree:
        residual = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), like)
        return ErrorFeedbackState(residual, self.codec.init(like))

    def requantizable(self, like: PyTree) -> bool:
        return self.codec.requantizable(like)

    def encode(self, tree: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        return self.encode_if(None, tree, state, params)

    def encode_if(
        self, accepted: jax.Array | None, tree: PyTree, state: PyTree, params: PyTree = None
    ) -> tuple[PyTree, PyTree]:
        payload, inner, residual = self.codec.encode_with_residual(
            tree, state.codec, state.residual, self.decay, accepted, params
        )
        return payload, ErrorFeedbackState(residual, inner)


def error_feedback(codec: Codec, decay: float = 1.0) -> ErrorFeedback:
    """Give a codec a residual, which carries over the values that it did not send.

    Args:
      codec: any codec but EF21 and decoupled momentum; its payload and bytes stay as they are.
      decay: beta in [0, 1].

    Raises:
      ValueError: decay outside [0, 1], or such a codec.

    >>> from lowcomm_jax.compression import make
    >>> x = jnp.array([1.0, -4.0, 2.0])
    >>> codec = error_feedback(make("topk", k=1))
    >>> payload, state = codec.encode(x, codec.init(x))
    >>> codec.decode(payload, x), state.residual
    (Array([ 0., -4.,  0.], dtype=float32), Array([1., 0., 2.], dtype=float32))
    """
    return ErrorFeedback(codec, decay)
