r"""How many synchronisations a number of samples takes, with batches that grow.

With one synchronisation after every H steps and round k's batch b_k = b_0 q^k, K rounds use
N = R H b_0 (q^K - 1) / (q - 1) samples, so that

.. math:: K = \log_q\left(1 + \frac{N (q - 1)}{R H b_0}\right)

grows with the logarithm of N, where a fixed batch (q = 1) has K = N / (R H b_0). The tests ask for
geometric growth while ||g||^2 decays geometrically.

Source: derived here. AdLoCo (arXiv 2508.18182) claims logarithmic growth; we had not its theorem,
and this is not its proof.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def communications(
    samples: float, per_round: float, ratio: float = 1.0, cap: float | None = None
) -> float:
    """Number of synchronisations that N samples take, not rounded.

    Args:
      samples: N, of all regions together.
      per_round: R H b_0, samples of the first round.
      ratio: q >= 1, by which a round's batch exceeds the last one's.
      cap: most samples of a round, reached and kept (at least per_round); None = no limit.

    Raises:
      ValueError: a ratio below 1, or rounds without samples.
    """
    if not (ratio >= 1 and per_round > 0 and samples >= 0):
        raise ValueError(
            f"samples={samples}, per_round={per_round}, ratio={ratio}: give samples >= 0, "
            "per_round > 0 and ratio >= 1"
        )
    if ratio == 1:
        return samples / per_round
    if cap is not None:
        cap = max(cap, per_round)
        growing = math.ceil(math.log(cap / per_round, ratio))
        used = per_round * (ratio**growing - 1) / (ratio - 1)
        if samples > used:
            return growing + (samples - used) / cap
    return math.log1p(samples * (ratio - 1) / per_round) / math.log(ratio)


def measured_ratio(samples_per_round: Sequence[float]) -> float:
    """Mean growth q of the rounds of a run, (last / first)^(1 / (rounds - 1)); 1 for one round."""
    rounds = len(samples_per_round)
    if rounds < 2:
        return 1.0
    return (samples_per_round[-1] / samples_per_round[0]) ** (1 / (rounds - 1))
