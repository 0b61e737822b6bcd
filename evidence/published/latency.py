"""Latency of pair exchange against tree all-reduce.

Message times are log-normal, T = exp(mu + sigma z), in units of exp(mu) (arXiv 2506.10911, latency
model). A pair exchange is over after the slower of its two simultaneous messages: E max(T1, T2) =
exp(sigma**2 / 2) (1 + erf(sigma / 2)). A tree all-reduce reduces along a binomial tree: in each of
log2 N levels half of the remaining nodes send to the other half, which waits. It broadcasts back
the same way, and ends when the last node has the result.
"""

from dataclasses import dataclass

import numpy as np

from lowcomm_jax.network.randomness import generator
from lowcomm_jax.refused import refuse


@dataclass(frozen=True)
class LatencyRow:
    """One setting of the latency table, in units of exp(mu)."""

    regions: int
    sigma: float
    tree: float
    mean_pair: float
    slowest_pair: float


def latency_table(regions: int, sigma: float, rounds: int = 200, seed: int = 0) -> LatencyRow:
    """Simulate tree all-reduce and pair exchange.

    Args:
        regions: a power of two, at least 2.
        sigma: spread of the log-normal message times.
        rounds: independent repetitions.
        seed: of the draws.

    Raises:
        ValueError: out of range.
    """
    levels = max(regions, 1).bit_length() - 1
    found = []
    if regions < 2 or 2**levels != regions:
        found.append(
            f"regions {regions} is no power of two: use {2 ** max(levels, 1)} or "
            f"{2 ** (levels + 1)}"
        )
    if sigma < 0:
        found.append(f"sigma {sigma} is negative: use 0 or more")
    if rounds < 1:
        found.append(f"rounds {rounds}: use at least 1")
    refuse("latency table", found)
    rng = generator(seed, ("latency", regions, sigma))
    tree_T = np.array([_tree_time(regions, sigma, rng) for _ in range(rounds)])
    pair_TxP = np.exp(sigma * rng.standard_normal((rounds, regions // 2, 2))).max(axis=2)
    return LatencyRow(
        regions,
        sigma,
        float(tree_T.mean()),
        float(pair_TxP.mean()),
        float(pair_TxP.max(axis=1).mean()),
    )


def _tree_time(regions: int, sigma: float, rng: np.random.Generator) -> float:
    ready_N = np.zeros(regions)
    while len(ready_N) > 1:  # the odd half sends, the even half waits
        message_N = np.exp(sigma * rng.standard_normal(len(ready_N) // 2))
        ready_N = np.maximum(ready_N[0::2], ready_N[1::2] + message_N)
    while len(ready_N) < regions:
        message_N = np.exp(sigma * rng.standard_normal(len(ready_N)))
        ready_N = np.concatenate([ready_N, ready_N + message_N])
    return float(ready_N.max())
