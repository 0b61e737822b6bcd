"""AdLoCo (arXiv 2508.18182): DiLoCo runs with batches of their own that merge."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from oracle.loop import Regions, copy_tree, reduce_over, subtract, zeros_like
from oracle.problem import SIZE, Tree


def make_stream(
    seed: int, trainer: int, start: int, count: int, regions: int, dtype=np.float32
) -> dict[str, np.ndarray]:
    """Samples [start, start + count) of every stream (region, trainer): {"x": [R, n, d], "y"}.

    Sample i depends on (seed, region, trainer, i) alone; every region has its own truth.
    """
    x = np.zeros((regions, count, SIZE), dtype)
    y = np.zeros((regions, count), dtype)
    for r in range(regions):
        truth = np.random.default_rng([seed, 505, r]).standard_normal(SIZE)
        for n in range(count):
            rng = np.random.default_rng([seed, 606, r, trainer, start + n])
            x[r, n] = 0.5 * rng.standard_normal(SIZE)
            y[r, n] = x[r, n] @ truth + 0.3 * rng.standard_normal() + 0.2 * r
    return {"x": x, "y": y}


@dataclass
class Instance:
    """One trainer: its anchor, outer momentum, regions, and where it stands in its stream."""

    anchor: Tree
    momentum: Tree
    regions: Regions
    used: int = 0

    def round(self, number: int, stream: Callable, batch: int, period: int, outer) -> None:
        for _ in range(period):
            data = stream(number, self.used, batch)
            one_step = {key: value[None] for key, value in data.items()}
            self.regions.step(one_step, 1)
            self.used += batch
        deltas = [subtract(self.anchor, local) for local in self.regions.values]
        everyone = tuple(range(len(deltas)))
        mean = reduce_over(deltas, everyone, (1.0,) * len(deltas)).mean
        self.anchor, self.momentum = outer.step(self.anchor, mean, self.momentum)
        self.regions.values = [copy_tree(self.anchor) for _ in everyone]


def run_trainers(
    params: Tree,
    stream: Callable[[int, int, int], dict],
    requests: list[dict[int, int]],
    *,
    regions: int,
    period: int,
    merge_every: int,
    inner,
    outer,
    best_with_worst: bool = False,
    reset: bool = False,
) -> tuple[list[dict[int, Instance]], list[tuple[int, int, int]]]:
    """Run one round per entry of `requests`.

    Args:
      stream: `(trainer, start, count)` -> {"x": [R, count, d], "y": [R, count]}.
      requests: before each round, the batch that each trainer asks for; those that are gone are
        not read.

    Returns:
      (after each round: number -> trainer, merges as (round, survivor, retired)).
    """
    live = {
        number: Instance(copy_tree(params), zeros_like(params), Regions(params, inner, regions))
        for number in requests[0]
    }
    seen, merges = [], []
    for round_, asked in enumerate(requests):
        if round_ > 0 and round_ % merge_every == 0 and len(live) > 1:
            ranked = sorted(live, key=lambda i: (asked[i], -i))
            lost, kept = ranked[0], ranked[-1] if best_with_worst else ranked[1]
            merge_into(live[kept], live.pop(lost), asked[kept], asked[lost], inner, reset)
            merges.append((round_, kept, lost))
        for number, instance in live.items():
            instance.round(number, stream, asked[number], period, outer)
        seen.append({number: _copied(instance) for number, instance in live.items()})
    return seen, merges


def merge_into(kept: Instance, lost: Instance, b_kept, b_lost, inner, reset: bool) -> None:
    """x <- (b1 x1 + b2 x2) / (b1 + b2), moments alike or anew; outer momentum: the survivor's."""

    def mean(a, b):
        return np.asarray((b_kept * a + b_lost * b) / (b_kept + b_lost), np.float32)

    def trees(a, b):
        return {key: mean(a[key], b[key]) for key in a}

    kept.anchor = trees(kept.anchor, lost.anchor)
    pairs = list(zip(kept.regions.values, lost.regions.values))
    kept.regions.values = [trees(a, b) for a, b in pairs]
    if reset:
        kept.regions.states = [inner.init(value) for value in kept.regions.values]
        return
    for mine, theirs in zip(kept.regions.states, lost.regions.states):
        for moment in mine.keys() - {"count"}:
            mine[moment] = trees(mine[moment], theirs[moment])


def _copied(instance: Instance) -> Instance:
    regions = Regions(instance.anchor, instance.regions.inner, len(instance.regions.values))
    regions.values = [copy_tree(value) for value in instance.regions.values]
    regions.states = [
        {k: copy_tree(v) if isinstance(v, dict) else v for k, v in state.items()}
        for state in instance.regions.states
    ]
    momentum = copy_tree(instance.momentum)
    return Instance(copy_tree(instance.anchor), momentum, regions, instance.used)
