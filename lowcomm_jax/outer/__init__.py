"""Outer rules: Optax transforms of the reduced pseudo-gradient, one rule a file.

In: the merged pseudo-gradient (by default the mean over regions of anchor - local), as the updates
of an Optax transform, and the anchor as `params`. Out: what the loop adds to the anchor. Arithmetic
and state are fp32 (`precision.in_fp32`). A rate that is a schedule counts the updates of its own
state: outer rounds of a fragment, or arrivals.

`checks` words the refusals of the outer and landing rules. `gossip_stability` says for which
coefficients gossiping regions stay together.
"""

from lowcomm_jax.outer.average import average
from lowcomm_jax.outer.delayed_nesterov import DelayedNesterovState, delayed_nesterov
from lowcomm_jax.outer.eager import eager
from lowcomm_jax.outer.gossip import GossipState, gossip
from lowcomm_jax.outer.gossip_stability import (
    Consensus,
    check_stability,
    contraction_factor,
    gamma_limit,
    second_moment_matrix,
)
from lowcomm_jax.outer.heavy_ball import heavy_ball
from lowcomm_jax.outer.momentum_average import MomentumAverageState, look_ahead, momentum_average
from lowcomm_jax.outer.nesterov import nesterov
from lowcomm_jax.outer.restarting import RestartingState, restarting
from lowcomm_jax.outer.sgd import sgd

__all__ = [
    "Consensus",
    "DelayedNesterovState",
    "GossipState",
    "MomentumAverageState",
    "RestartingState",
    "average",
    "check_stability",
    "contraction_factor",
    "delayed_nesterov",
    "eager",
    "gamma_limit",
    "gossip",
    "heavy_ball",
    "look_ahead",
    "momentum_average",
    "nesterov",
    "restarting",
    "second_moment_matrix",
    "sgd",
]
