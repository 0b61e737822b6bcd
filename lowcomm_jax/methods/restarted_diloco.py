"""DiLoCo's round with an outer momentum that restarts every K rounds (arXiv 2605.28585).

The rule is `outer.restarting`. Other methods take it, too (`outer={"name": "restarting"}` in a
config): with fragments every fragment counts rounds of its own.

Source: notes of a replication (Llama-150M, two workers, H from 64 to 2048), where K and the rates
are from; of the paper only the abstract was read. Codecs are an addition of ours.
"""

from __future__ import annotations

from typing import Any

from lowcomm_jax.methods.base import Method, published
from lowcomm_jax.methods.diloco import diloco
from lowcomm_jax.refused import collect
from lowcomm_jax.rules.outer import restarting


@published(period=64)
def restarted_diloco(
    period: int,
    every: int = 3,
    learning_rate: float = 0.9,
    momentum: float = 0.7,
    codec: Any = None,
    inner_batching: Any = None,
) -> Method:
    """Synchronise every `period` inner steps; the outer momentum restarts every `every` rounds.

    Args:
      every: K, rounds between two restarts.
      learning_rate: outer learning rate.
      momentum: weight of the old outer momentum, in [0, 1).
      period, codec, inner_batching: as in `diloco`.
    """
    problems = []
    rule = collect(problems, "", lambda: restarting(learning_rate, momentum, every))
    return diloco(period, rule, codec, inner_batching).named("restarted_diloco", problems)
