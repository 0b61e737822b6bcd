r"""Alignment with the outer momentum (HeLoCo, arXiv 2606.00271), for arrivals one at a time.

Per tensor, with m the outer momentum, $\hat x = x / \lVert x\rVert$,
$c = \cos(\Delta, m)$ and
$q = \lVert\Delta\rVert / (\lVert\Delta\rVert + \kappa \lVert m\rVert + \epsilon)$:

$$\Delta \leftarrow \begin{cases}
  \Delta & c \ge c_{ok} \\
  \Delta - \beta\, c\, \lVert\Delta\rVert\, \hat m, \quad
    \beta = \min(-k_s\, c\, q,\; \beta_{max}) & c < 0 \\
  \lVert\Delta\rVert\; \widehat{(1-\lambda)\hat\Delta + \lambda \hat m}, \quad
    \lambda = \min(k_d (1 - c)\, q,\; 1) & \text{else}
\end{cases}$$

An arrival that points against the momentum loses a part of that component; one that points aside is
turned towards the momentum. Where m is 0, as before the first arrival, $\Delta$ stays.

| symbol | meaning | argument |
| --- | --- | --- |
| $c_{ok}$ | cosine from which an arrival stays as it is | `enough` |
| $k_s, \beta_{max}$ | strength of the removal, and its bound | `removal`, `most` |
| $k_d$ | strength of the turn | `turn` |
| $\kappa$ | weight of the momentum's length | `confidence` |

Source: the published code, where the defaults are from; of the paper only notes were read.

Differs from the code: that merges one arrival at a time; of several payloads at once this rule
reads the mean.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from lowcomm_jax.merge.base import Merge, norm
from lowcomm_jax.optimizers import Kind

_TINY = 1e-12


@dataclasses.dataclass(frozen=True)
class Align(Merge):
    """Alignment with the outer momentum; see `Merge`, reads the mean.

    The outer state needs an entry `momentum`, as that of `outer.momentum_average` has.

    Attributes:
      enough: cosine from which an arrival stays as it is, in [0, 1].
      removal, most: strength of the removal, and its bound; 0 = off.
      turn: strength of the turn; 0 = off.
      confidence: weight of the momentum's length, not negative.
    """

    enough: float = 0.2
    removal: float = 0.5
    turn: float = 1.0
    confidence: float = 3.0
    most: float = 0.5
    reads: ClassVar[Literal["payloads", "mean"]] = "mean"
    momentum: ClassVar[str | None] = "momentum"

    def violations(self) -> list[str]:
        found = []
        if not 0 <= self.enough <= 1:
            found.append(f"enough={self.enough}: give a cosine from 0 to 1")
        for name in ("removal", "turn", "confidence", "most"):
            if not 0 <= getattr(self, name) < math.inf:
                found.append(f"{name}={getattr(self, name)}: give 0 (off) or a positive number")
        return found

    def tensor(
        self, delta_RxN: jax.Array, weight_R: jax.Array, kind: Kind, momentum: jax.Array | None
    ) -> jax.Array:
        del kind, weight_R
        delta = delta_RxN[0]
        length, long = norm(delta), norm(momentum)
        m_hat = momentum / jnp.maximum(long, _TINY)
        cosine = jnp.sum(delta * m_hat) / jnp.maximum(length, _TINY)
        certain = length / (length + self.confidence * long + _TINY)
        beta = jnp.minimum(self.removal * -cosine * certain, self.most)
        against = delta - beta * cosine * length * m_hat
        lam = jnp.minimum(self.turn * (1 - cosine) * certain, 1.0)
        turned = (1 - lam) * delta / jnp.maximum(length, _TINY) + lam * m_hat
        aside = length * turned / jnp.maximum(norm(turned), _TINY)
        kept = (cosine >= self.enough) | (long <= _TINY) | (length <= _TINY)
        return jnp.where(kept, delta, jnp.where(cosine < 0, against, aside))
