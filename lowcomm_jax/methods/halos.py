r"""HALoS (arXiv 2506.04531): asynchronous on two levels, with no barrier on either.

Workers of a group arrive at their local server; every K arrivals the local servers arrive at the
global one, over the slow links:

.. math::
   \Delta_r = \Theta^{\text{received by } r} - \theta_r, \qquad
   \phi_g \leftarrow \mathrm{DelayedNesterov}(\phi_g, \Delta_r), \qquad \theta_r \leftarrow \phi_g

.. math::
   u_g = \phi_g^{\text{merged}} - \phi_g, \qquad
   \Theta \leftarrow \mathrm{DelayedNesterov}(\Theta, u_g), \qquad
   \phi_g \leftarrow (1 - \alpha)\,\phi_g + \alpha\,\Theta

A server keeps serving while its update travels; what arrives meanwhile stays in its model, and
enters no later update. A reply goes only to the worker, or the server, that it answers.

Source: the published code. Its rates are 0.2 x 16 and 0.15 x 2, since it divides by N as
`outer.delayed_nesterov` does.

Differs from it: time is counted in ticks, inner steps of the fastest worker, and links between the
servers take `travel` ticks. Arrivals of one tick are served in region order.

Ours are the codecs, one per level, of what goes up: Delta_r and u_g, each sender with a residual of
its own where the codec has one. Models that come back are dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowcomm_jax.methods.base import LocalServers, Method
from lowcomm_jax.refused import collect, tuples
from lowcomm_jax.rules.outer import delayed_nesterov
from lowcomm_jax.schedule import TwoLevels


def halos(
    period: int,
    speeds: Sequence[float],
    groups: Sequence[Sequence[int]],
    every: int = 32,
    blend: float = 0.25,
    learning_rate: float = 3.2,
    momentum: float = 0.9,
    buffer: int = 16,
    global_learning_rate: float = 0.3,
    global_momentum: float = 0.5,
    global_buffer: int = 2,
    travel: int | Sequence[int] = 0,
    dynamic: bool = True,
    inner_batching: Any = None,
    codec: Any = None,
    global_codec: Any = None,
) -> Method:
    """Train workers that arrive at local servers, which arrive at a global one.

    Args:
      period: H, inner steps of the fastest worker between two of its arrivals.
      speeds: inner steps per second of each region (worker), in any unit, `[R]`.
      groups: regions of each local server; every region is in exactly one.
      every: K, arrivals at a local server between its updates.
      blend: alpha, weight of the global model in a merge, in [0, 1].
      learning_rate: of a local server's `outer.delayed_nesterov`.
      momentum: of a local server, in [0, 1).
      buffer: N, arrivals between two renewals of a local server's momentum.
      global_learning_rate: of the global server's `outer.delayed_nesterov`.
      global_momentum: of the global server, in [0, 1).
      global_buffer: N, arrivals between two renewals of the global server's momentum.
      travel: ticks one way between a local and the global server; one number or one per group.
      dynamic: ceil(v / max v H) inner steps between arrivals instead of H.
      inner_batching: as in `diloco`.
      codec: of what workers send to their server; None = dense fp32.
      global_codec: of what servers send to the global one: a codec, its name, or a mapping; None =
        dense fp32.
    """
    problems: list[str] = []
    local_rule = collect(problems, "", lambda: delayed_nesterov(learning_rate, momentum, buffer))
    global_rule = collect(
        problems,
        "global_",
        lambda: delayed_nesterov(global_learning_rate, global_momentum, global_buffer),
    )
    return Method(
        name="halos",
        schedule=TwoLevels(
            period,
            tuples(speeds),
            dynamic,
            tuples(groups),
            every,
            tuples(travel),
        ),
        outer=global_rule,
        servers=LocalServers(local_rule, blend, global_codec),
        codec=codec,
        inner_batching=inner_batching,
        base="received",
        problems=tuple(problems),
    )
