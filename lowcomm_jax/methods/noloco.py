r"""NoLoCo (arXiv 2506.10911): no all-reduce; regions average in small random groups.

Every H steps a seeded draw, the same in all regions, splits them into groups G of n. Each region
keeps an anchor and a momentum of its own:

.. math::
   \Delta_j = \phi_j - \theta_j, \qquad
   \phi_i \leftarrow \mathrm{Gossip}\Big(\phi_i,\; \frac1n \sum_{j \in G} \Delta_j,\;
     \frac1n \sum_{j \in G} \phi_j\Big), \qquad \theta_i \leftarrow \phi_i

with the rule of `outer.gossip`. The regions are never equal, only kept close; the model is any of
them or, as `global_params` gives it, their mean.

Two things travel:

- Delta, encoded, at the boundary; the partner waits for it.
- phi, in fp32, to the next round's partner. A region sends it when the round before has landed,
  H inner steps before it is needed. It does not go through the codec: regions could not come closer
  to one another than the codec's rounding. Before the first round all anchors are equal, and none
  travels; between jobs they do, with Delta.

A region that takes no part counts in no mean: its partner uses its own Delta and its own anchor.
The absent region's anchor moves by its group's mean and its local values stay. A region without a
group (R is odd, or n does not divide it) uses its own Delta and anchor.

Differs from the paper as `outer.gossip` says. Coefficients under which the regions drift apart are
refused (`consensus.Consensus`, where the limit also differs from the paper's). Groups come from
`topology.Gossip`. Anchors and momentum stay in fp32.
"""

from __future__ import annotations

from typing import Any

from lowcomm_jax.methods.base import Method, published
from lowcomm_jax.rules.consensus import Consensus
from lowcomm_jax.rules.outer import Variant, gossip, gossip_problems
from lowcomm_jax.rules.topology import Gossip
from lowcomm_jax.schedule import Staggered


@published(period=50, codec="bf16")
def noloco(
    period: int,
    group_size: int = 2,
    alpha: float = 0.5,
    beta: float = 0.7,
    gamma: float = 0.7,
    seed: int = 0,
    variant: Variant = "heavy_ball",
    codec: Any = None,
    inner_batching: Any = None,
) -> Method:
    """Average with one small random group a round.

    Args:
      period: H, inner steps between exchanges; the paper's runs use 50, half of its DiLoCo's.
      group_size: n, regions of a group, from 2 to the number of regions.
      alpha: outer momentum. DiLoCo's 0.9 needs a smaller gamma than 0.7.
      beta: outer learning rate.
      gamma: pull towards the group; its range depends on alpha, n and the number of regions.
      seed: seed of the draw of groups, a whole number from 0.
      variant: `heavy_ball` (the paper's code) or `nesterov` (look-ahead).
      codec: wire codec of the pseudo-gradients; None = dense fp32. Anchors travel in fp32.
      inner_batching: as in `diloco`.
    """
    problems = gossip_problems(alpha, beta, gamma, variant)
    sound = not problems
    consensus = Consensus(alpha, gamma, group_size, variant) if sound else None
    return Method(
        name="noloco",
        schedule=Staggered(period),
        outer=gossip(alpha, beta, gamma, variant) if sound else None,
        codec=codec,
        inner_batching=inner_batching,
        anchors="per_region",
        topology=Gossip(group_size, seed, consensus),
        problems=tuple(problems),
    )
