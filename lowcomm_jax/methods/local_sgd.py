"""Local SGD, FedAvg (arXiv 1602.05629): DiLoCo's round that ends on the mean of the parameters.

The outer step is `outer.average`, without momentum.
"""

from __future__ import annotations

from typing import Any

from lowcomm_jax.methods.base import Method
from lowcomm_jax.methods.diloco import diloco
from lowcomm_jax.rules.outer import average


def local_sgd(period: int, codec: Any = None, inner_batching: Any = None) -> Method:
    """Average the regions' parameters every `period` inner steps.

    Args:
      period, codec, inner_batching: as in `diloco`.
    """
    return diloco(period, average(), codec, inner_batching).named("local_sgd")
