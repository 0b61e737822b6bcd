r"""Streaming DiLoCo (arXiv 2501.18512, Alg. 2): fragments, overlapped with tau inner steps.

Fragment p leaves every H steps, staggered against the others (`schedule.Staggered`), and lands tau
inner steps later (`landing.blend`):

.. math::
   \Delta_{r,p} = \Theta_p - \theta_{r,p}(t), \qquad
   \Theta_p \leftarrow \mathrm{Nesterov}(\Theta_p, \bar\Delta_p), \qquad
   \theta_{r,p} \leftarrow \mathrm{Blend}_\alpha(\theta_{r,p}, \Theta_p) \quad\text{at } t + \tau

Differs from the paper:

- The base of a pseudo-gradient is the anchor shared by all regions, not a region's own last value.
  Read literally, the listing lets replicas drift apart for ever; the paper's text and other
  implementations use the shared anchor.
- The first send of fragment p comes after floor((p+1) H / K) steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import optax

from lowcomm_jax.methods.base import Method, published
from lowcomm_jax.params.fragments import Pattern
from lowcomm_jax.refused import collect
from lowcomm_jax.rules.landing import blend
from lowcomm_jax.rules.outer import nesterov
from lowcomm_jax.schedule import Staggered


@published(law="diloco", fragments=8, overlap=1, codec="e3m0")
def streaming_diloco(
    period: int,
    fragments: int,
    overlap: int | tuple[int, ...],
    alpha: float,
    pattern: Pattern | Sequence[str] = "strided",
    outer: optax.GradientTransformation | None = None,
    codec: Any = None,
    inner_batching: Any = None,
    rest: Literal["own", "dealt"] = "dealt",
) -> Method:
    """Synchronise one of K fragments at a time, while `overlap` inner steps go on.

    Args:
      period: H, inner steps between two sends of a fragment.
      fragments: K <= H, parts that travel one at a time.
      overlap: tau < H, inner steps from send to landing; one for all regions, or one each.
      alpha: weight of the local value at a landing, in [0, 1]. With 0 a region drops its tau local
        steps; with 1 it drops what the others sent.
      pattern: how the parameters are cut: `sequential`, `strided`, `balanced`, `balanced_tensors`,
        or K regular expressions (`params.fragments.partition`).
      rest: where leaves outside the blocks go: `dealt` to the fragments like blocks, or into a
        fragment of their `own`.
      outer: Optax transform of the mean pseudo-gradient; default Nesterov 0.4 / 0.9.
      codec: wire codec; None = dense fp32 (the paper's 4-bit E3M0 is in its config).
      inner_batching: as in `diloco`.
    """
    problems: list[str] = []
    landing = collect(problems, "", lambda: blend(alpha))
    return Method(
        name="streaming_diloco",
        schedule=Staggered(period, fragments, overlap),
        outer=nesterov(0.4, 0.9) if outer is None else outer,
        landing=None if landing is None or alpha == 0 else landing,
        codec=codec,
        inner_batching=inner_batching,
        pattern=pattern,
        rest=rest,
        problems=tuple(problems),
    )
