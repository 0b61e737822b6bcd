"""Time alternatives side by side: all variants of a comparison run in turn in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from experiments.progress import Work


def interleave(
    variants: Mapping[str, Callable[[], Any]], repeats: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Seconds of each variant over `repeats` rounds, one after the other within a round.

    Load on the machine then affects all variants alike, and ratios within a round can be compared.

    Args:
      variants: name -> function; its clock stops when the arrays that it returns are ready.
      warm_up: rounds before, which are not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    parts = [(round_, name) for round_ in range(warm_up + repeats) for name in variants]
    with Work("timed", len(parts)) as work:
        for done, (round_, name) in enumerate(parts):
            work.at(name, done)
            start = time.perf_counter()
            jax.block_until_ready(variants[name]())
            if round_ >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(slower: list[float], faster: list[float]) -> float:
    """Median over rounds of seconds(`slower`) / seconds(`faster`)."""
    return statistics.median(a / b for a, b in zip(slower, faster))


def median(values: list[float]) -> float:
    return statistics.median(values)
