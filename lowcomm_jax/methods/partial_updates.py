r"""Partial parameter updates (arXiv 2509.22418): a region trains a fixed part of the parameters.

DiLoCo's round with other sums. With :math:`T_i` the regions present that train entry i:

.. math::
   \bar\Delta_i = \frac{1}{|T_i|} \sum_{r \in T_i} (\Theta_i - \theta_{r,i}), \qquad
   \Theta \leftarrow \mathrm{Nesterov}(\Theta, \bar\Delta), \qquad \theta_r \leftarrow \Theta

Known from notes; the paper was not read. Our readings: parts are rows of leaves, and a leaf without
a role is trained everywhere. What a region does not train has no gradient there, and no weight
decay. Where the regions that train an entry are all absent, its mean is 0 and its momentum goes on;
where nobody takes part, nothing moves. An entry that nobody trains never moves. Weights given to
the engine weigh the mean.

Differs from the paper: no time, memory or bytes are saved. Regions are one program, which computes
whole gradients and masks them, and holds all moments; so does a region that is a job of its own.
Payloads are dense, with zeros where a region does not train. There is no codec.
"""

from __future__ import annotations

from typing import Any

import optax

from lowcomm_jax.methods.base import Method
from lowcomm_jax.methods.diloco import diloco


def partial_updates(
    period: int, roles: Any, outer: optax.GradientTransformation | None = None
) -> Method:
    """Synchronise every `period` inner steps, each entry over the regions that train it.

    Args:
      period: H, inner steps per round.
      roles: which rows of which leaves a region trains: `roles.Shares`, `roles.Rows`, your own, or
        a mapping, as `{"name": "shares", "leaves": "mlp/", "axis": 1}`.
      outer: Optax transform of the mean pseudo-gradient; default Nesterov 0.7 / 0.9.
    """
    problems = (
        () if roles is not None else ("roles=None: say what each region trains, or use diloco",)
    )
    return diloco(period, outer).named("partial_updates", problems, roles=roles)
