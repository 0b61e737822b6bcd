r"""Asynchronous local SGD (arXiv 2401.09135): Delayed Nesterov and dynamic local updates.

Regions of different speed wait for nobody; every arrival moves the shared anchor at once:

.. math::
   \Delta_r = \Theta^{\text{received by } r} - \theta_r, \qquad
   \Theta \leftarrow \mathrm{DelayedNesterov}(\Theta, \Delta_r), \qquad \theta_r \leftarrow \Theta

Differs from the paper: time is counted in ticks, inner steps of the fastest region. Arrivals of
one tick are applied in region order, and then all of them get the newest anchor (a grace period of
one tick). Data shards are not resampled by progress. Between jobs arrivals are those of real time
(`jobs.round_carrier`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowcomm_jax.methods.base import Method
from lowcomm_jax.refused import collect, tuples
from lowcomm_jax.rules.outer import delayed_nesterov
from lowcomm_jax.schedule import Arrivals


def async_local_sgd(
    period: int,
    speeds: Sequence[float],
    learning_rate: float = 0.7,
    momentum: float = 0.9,
    buffer: int | None = None,
    c: float = 0.0,
    dynamic: bool = True,
    codec: Any = None,
    inner_batching: Any = None,
) -> Method:
    """Apply every region's pseudo-gradient as it arrives.

    Args:
      period: H, inner steps of the fastest region between two of its arrivals.
      speeds: inner steps per second of each region, in any unit, `[R]`; between jobs they decide
        only how many steps a region makes between its arrivals.
      learning_rate: outer learning rate of an arrival.
      momentum: weight of the old outer momentum, in [0, 1).
      buffer: arrivals between two renewals of the momentum; None = R.
      c: share of the momentum applied at the arrivals in between, in [0, 1 / buffer].
      dynamic: floor(v / max v H) inner steps between arrivals instead of H (DyLU).
      codec, inner_batching: as in `diloco`.
    """
    speeds = tuples(speeds)
    regions = len(speeds) if isinstance(speeds, tuple) else 1
    window = max(regions, 1) if buffer is None else buffer
    problems: list[str] = []
    rule = collect(problems, "", lambda: delayed_nesterov(learning_rate, momentum, window, c))
    return Method(
        name="async_local_sgd",
        schedule=Arrivals(period, speeds, dynamic),
        outer=rule,
        codec=codec,
        inner_batching=inner_batching,
        base="received",
        problems=tuple(problems),
    )
