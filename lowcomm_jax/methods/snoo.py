"""SNOO (arXiv 2510.15830): Nesterov on the progress of K steps of one worker.

This is DiLoCo's round (`diloco`) of one region: the slow weights are the anchor, the fast ones the
region's. Nothing travels: `regions=1`. With more regions it is DiLoCo with SNOO's rates, which the
paper does not propose.

Source: notes on the paper, where the defaults are those of a 125M model; of the paper only the
abstract was read.
"""

from __future__ import annotations

from typing import Any

from lowcomm_jax.methods.base import Method
from lowcomm_jax.methods.diloco import diloco
from lowcomm_jax.refused import collect
from lowcomm_jax.rules.outer import nesterov


def snoo(
    period: int = 100,
    learning_rate: float = 0.8,
    momentum: float = 0.75,
    codec: Any = None,
    inner_batching: Any = None,
) -> Method:
    """Make an outer Nesterov step every `period` inner steps; meant for one region.

    Args:
      period: K, inner steps per outer step.
      learning_rate: outer learning rate.
      momentum: weight of the old outer momentum, in [0, 1).
      codec: wire codec, for several regions; None = dense fp32.
      inner_batching: as in `diloco`.
    """
    problems = []
    rule = collect(problems, "", lambda: nesterov(learning_rate, momentum))
    return diloco(period, rule, codec, inner_batching).named("snoo", problems)
