"""Latency of pair exchange against tree all-reduce, and idle time without a global barrier.

Message times are log-normal, T = exp(mu + sigma z), in units of exp(mu) (arXiv 2506.10911, latency
model). A pair exchange is over after the slower of its two simultaneous messages: E max(T1, T2) =
exp(sigma**2 / 2) (1 + erf(sigma / 2)). A tree all-reduce reduces along a binomial tree: in each of
log2 N levels half of the remaining nodes send to the other half, which waits. It broadcasts back
the same way, and ends when the last node has the result.

With the defaults of `idle_table` (seed 0, 100 rounds), regions are idle for these shares of the
time: 56, 66 and 72 % with a global barrier, for 100, 1,000 and 10,000 regions; 28, 30 and 30 % when
each waits for its partner only.
"""

import math
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


@dataclass(frozen=True)
class IdleRow:
    """Share of time regions stand idle, with a global barrier and with pairs only."""

    regions: int
    rounds: int
    barrier_idle: float
    pair_idle: float
    barrier_wall: float
    pair_wall: float


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


def idle_table(
    regions: int,
    rounds: int,
    compute_s: float = 50.0,
    compute_sigma: float = 0.3,
    message_sigma: float = 0.5,
    seed: int = 0,
) -> IdleRow:
    """Simulate rounds of compute and exchange, once with a global barrier, once waiting for the
    partner only.

    Args:
        regions: at least 2; with an odd number one region sits out each round.
        rounds: outer rounds.
        compute_s: median compute time of a round in units of the message median.
        compute_sigma: log-normal spread of a region's compute time per round.
        message_sigma: log-normal spread of message times.
        seed: of pairing and draws (pairing by a fresh permutation each round).

    Returns:
        Idle share = time not spent computing / total, averaged over regions. The barrier's exchange
        costs the 2 log2(N) levels of a tree at median message time.

    Raises:
        ValueError: out of range.
    """
    found = []
    if regions < 2:
        found.append(f"regions {regions}: use at least 2")
    if rounds < 1:
        found.append(f"rounds {rounds}: use at least 1")
    refuse("idle table", found)
    rng = generator(seed, ("idle", regions))
    now_R, barrier, busy_R = np.zeros(regions), 0.0, np.zeros(regions)
    tree = 2.0 * math.log2(regions)
    half = regions // 2
    for _ in range(rounds):
        work_R = compute_s * np.exp(compute_sigma * rng.standard_normal(regions))
        message_2xP = np.exp(message_sigma * rng.standard_normal((2, half)))
        order_R = rng.permutation(regions)
        left, right = order_R[:half], order_R[half : 2 * half]
        busy_R += work_R
        now_R += work_R
        done_P = np.maximum(now_R[left], now_R[right]) + message_2xP.max(axis=0)
        now_R[left] = now_R[right] = done_P
        barrier += float(work_R.max()) + tree
    return IdleRow(
        regions,
        rounds,
        barrier_idle=1.0 - float(busy_R.mean()) / barrier,
        pair_idle=1.0 - float((busy_R / now_R).mean()),
        barrier_wall=barrier,
        pair_wall=float(now_R.max()),
    )
