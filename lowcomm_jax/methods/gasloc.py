r"""GASLoC (arXiv 2606.11081): gossip with momentum on the parameters that regions exchange.

Region i makes its H_i inner steps from theta_i. Then a seeded draw, the same in all regions, splits
them into groups G of a region and its peers:

.. math::
   u_i = \theta_i + \eta\,g_i, \qquad
   \theta_i \leftarrow u_i - \alpha\,(u_i - \bar u_G) + \gamma\,(u_i - u_i^{\text{before}})

The regions are never equal, only kept close; the model is any of them or, as `global_params` gives
it, their mean. The anchor of region i is theta_i, and g_i its pseudo-gradient, negated; u_i before
is that of the round before, at first theta_i.

Known from notes, where the equations are from; the paper was not read. Our readings: the Laplacian
of a matching with equal weights gives u_i less its group's mean. Groups are those of
`topology.Gossip`. A region that takes no part keeps theta, u and its local values; its peers use
the mean of those that do. Values of alpha, gamma and eta were not seen, so they have no defaults.
Without gradients the rule is heavy ball towards the group, so that coefficients under which regions
drift apart are refused as NoLoCo's are (`consensus.Consensus`).

Differs from the paper: not u travels, but, as in NoLoCo, g encoded at the boundary, and theta in
fp32 ahead of it, when the round before has landed. That is twice the bytes, and a codec cannot keep
regions apart. Numbers of steps that differ are counted in ticks on one mesh, of which the longest
round has one a step (`schedule.Timed`). Between jobs, where regions keep time by themselves, they
are refused: a payload's terms name its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lowcomm_jax.methods.base import Method
from lowcomm_jax.refused import in_range, is_whole, tuples
from lowcomm_jax.rules.consensus import Consensus
from lowcomm_jax.rules.precision import in_fp32, widen
from lowcomm_jax.rules.topology import Gossip
from lowcomm_jax.schedule import Staggered, Timed


def gasloc(
    period: int | Sequence[int],
    alpha: float,
    gamma: float,
    rate: float,
    peers: int = 1,
    seed: int = 0,
    codec: Any = None,
    inner_batching: Any = None,
) -> Method:
    """Average with one or two random peers a round, with momentum on what is averaged.

    Args:
      period: H, inner steps between exchanges; one number, or one for each region.
      alpha: pull towards the group; its range depends on gamma, the peers and the number of
        regions.
      gamma: momentum, in [0, 1).
      rate: eta, positive; 1 = a region goes on from where it is.
      peers: regions that each averages with, from 1; the paper has 1 or 2.
      seed: seed of the draw of groups, a whole number from 0.
      codec: wire codec of the progress; None = dense fp32. Parameters travel in fp32.
      inner_batching: as in `diloco`.
    """
    period = tuples(period)
    own_pace = isinstance(period, tuple)
    steps = period if own_pace else (period,)
    checks = [
        in_range("alpha", alpha, 0.0, float("inf")),
        in_range("gamma", gamma, 0.0, 1.0, open_high=True),
        in_range("rate", rate, 0.0, float("inf"), open_low=True),
        None if is_whole(peers) and peers >= 1 else f"peers={peers!r}: use 1 or 2",
        None
        if steps and all(is_whole(h) and h >= 1 for h in steps)
        else f"period={period!r}: give a whole number of inner steps, or one for each region",
    ]
    problems = [problem for problem in checks if problem is not None]
    if problems:
        unfit = Method("gasloc", Staggered(1), None, codec=codec, inner_batching=inner_batching)
        return unfit.named("gasloc", problems)
    together = Consensus(gamma, alpha, peers + 1, names=("gamma", "alpha"))
    return Method(
        name="gasloc",
        schedule=Timed(max(period), period) if own_pace else Staggered(period),
        outer=gossip_momentum(alpha, gamma, rate),
        codec=codec,
        inner_batching=inner_batching,
        anchors="per_region",
        topology=Gossip(peers + 1, seed, together, reads_own=True),
    )


class ExchangedState(NamedTuple):
    """u of the round before, fp32, a tree like the parameters."""

    before: Any


def gossip_momentum(alpha: float, gamma: float, rate: float) -> optax.GradientTransformation:
    """The outer rule above, for a topology that `reads_own`; its arguments are in range."""

    def init(params):
        return ExchangedState(jax.tree.map(jnp.copy, params))

    def update(mean_delta, state, params=None, *, group_anchor, own, **extra):
        del extra

        def after(theta, delta):
            return jax.tree.map(lambda x, d: x - rate * d, theta, delta)

        own = widen(own)
        u, mean_u = after(params, own), after(widen(group_anchor), mean_delta)

        def step(d, u, mean_u, before):
            return gamma * (u - before) - alpha * (u - mean_u) - rate * d

        return jax.tree.map(step, own, u, mean_u, state.before), ExchangedState(u)

    return in_fp32(optax.GradientTransformationExtraArgs(init, update))
