r"""HeLoCo (arXiv 2606.00271): arrivals are aligned with the momentum, a look-ahead is handed out.

Regions of different speed wait for nobody (`async_local_sgd`). Every arrival is corrected tensor by
tensor (A, `merge.Align`), then moves the shared anchor and its momentum m at once:

.. math::
   \Delta_r = \Theta^{\text{received by } r} - \theta_r, \qquad
   \Theta \leftarrow \mathrm{MomentumAverage}(\Theta, \rho\, A(\Delta_r, m)), \qquad
   \theta_r \leftarrow \mathrm{LookAhead}(\Theta, m)

The last two are `outer.momentum_average` and `outer.look_ahead`. A region's next pseudo-gradient is
measured against the look-ahead that it receives. `global_params` gives the anchor itself.

Source: the published code; of the paper only notes were read. Differs from it: time is counted in
ticks, as in `async_local_sgd`. Arrivals of one tick are applied in region order, and then all of
them get the newest look-ahead. DyLU (`dynamic`) and codecs are additions of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optax

from lowcomm_jax.methods.async_local_sgd import async_local_sgd
from lowcomm_jax.methods.base import Method
from lowcomm_jax.refused import collect, is_number
from lowcomm_jax.rules.merge import Align
from lowcomm_jax.rules.outer import look_ahead, momentum_average


def heloco(
    period: int,
    speeds: Sequence[float],
    learning_rate: float = 0.7,
    momentum: float = 0.9,
    weight: float = 1.0,
    enough: float = 0.2,
    removal: float = 0.5,
    turn: float = 1.0,
    confidence: float = 3.0,
    most: float = 0.5,
    dynamic: bool = False,
    codec: Any = None,
    inner_batching: Any = None,
) -> Method:
    """Apply every region's pseudo-gradient as it arrives, aligned with the momentum.

    Args:
      period: H, inner steps of a region between two of its arrivals.
      learning_rate: outer learning rate of an arrival, and of the look-ahead.
      momentum: weight of the old outer momentum, in [0, 1).
      weight: rho, weight of an arrival, above 0; the paper has 1 or 1 / sqrt(R).
      enough: cosine to the momentum from which an arrival stays as it is, in [0, 1].
      removal: strength at which the part against the momentum is removed; 0 = off.
      turn: strength of the turn towards the momentum; 0 = off.
      confidence: weight of the momentum's length in both strengths, not negative.
      most: largest share that is removed; 0 = off.
      speeds, dynamic: as in `async_local_sgd`.
      codec, inner_batching: as in `diloco`.
    """
    arrivals = async_local_sgd(
        period, speeds, dynamic=dynamic, codec=codec, inner_batching=inner_batching
    )
    problems: list[str] = []
    rule = collect(problems, "", lambda: momentum_average(learning_rate, momentum))
    if not (is_number(weight) and weight > 0):
        problems.append(f"weight={weight!r}: give a positive number")
    elif weight != 1 and rule is not None:
        rule = optax.chain(optax.scale(weight), rule)
    return arrivals.named(
        "heloco",
        problems,
        outer=rule,
        merge=Align(enough, removal, turn, confidence, most),
        hands_out=look_ahead(learning_rate, momentum),
    )
