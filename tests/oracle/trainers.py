"""AdLoCo (arXiv 2508.18182): DiLoCo runs with batches of their own that merge."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from oracle.loop import Regions, copy_tree, reduce_over, subtract, zeros_like
from oracle.problem import SIZE, Tree, flatten, gradient


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
    """One trainer: its anchor, outer momentum, regions, where it stands in its stream, and what it
    asks for. `memory` is the batch test's."""

    anchor: Tree
    momentum: Tree
    regions: Regions
    asks: int
    used: int = 0
    memory: tuple[float, ...] = ()

    def round(self, number: int, stream: Callable, batch: int, factors: list[float], outer) -> None:
        """One inner step per factor on the learning rate, then one outer step."""
        for factor in factors:
            data = stream(number, self.used, batch)
            before = [copy_tree(local) for local in self.regions.values]
            self.regions.step({key: value[None] for key, value in data.items()}, 1)
            for local, old in zip(self.regions.values, before):
                for key in local:
                    local[key] = np.asarray(old[key] + factor * (local[key] - old[key]), np.float32)
            self.used += batch
        deltas = [subtract(self.anchor, local) for local in self.regions.values]
        everyone = tuple(range(len(deltas)))
        mean = reduce_over(deltas, everyone, (1.0,) * len(deltas)).mean
        self.anchor, self.momentum = outer.step(self.anchor, mean, self.momentum)
        self.regions.values = [copy_tree(self.anchor) for _ in everyone]


def run_trainers(
    params: Tree,
    stream: Callable[[int, int, int], dict],
    decide: Callable[[int, int, Instance], int],
    *,
    rounds: int,
    start: dict[int, int],
    regions: int,
    period: int,
    merge_every: int,
    inner,
    outer,
    samples_of: Callable[[int], int] = lambda asked: asked,
    factor: Callable[[int, int], float] = lambda consumed, batch: 1.0,
) -> tuple[list[dict[int, Instance]], list[tuple[int, int, int]]]:
    """Run rounds of several trainers.

    Args:
      stream: `(trainer, start, count)` -> {"x": [R, count, d], "y": [R, count]}.
      decide: `(round, number, trainer as it enters the round)` -> what it asks for in the next one.
      start: what each asks for in round 0.
      samples_of: asked -> samples of a region's step.
      factor: (samples of all trainers and regions before this step, a region's samples) -> factor
        on the learning rate.

    Returns:
      (after each round: number -> trainer, merges as (round, survivor, retired)).
    """
    live = {
        number: Instance(copy_tree(params), zeros_like(params), Regions(params, inner, regions), b)
        for number, b in start.items()
    }
    seen, merges, consumed = [], [], 0
    for round_ in range(rounds):
        if round_ > 0 and round_ % merge_every == 0 and len(live) > 1:
            ranked = sorted(live, key=lambda i: (live[i].asks, -i))
            lost, kept = ranked[:2]
            merge_into(live[kept], live.pop(lost))
            merges.append((round_, kept, lost))
        batches = {number: samples_of(instance.asks) for number, instance in live.items()}
        together = regions * sum(batches.values())
        for number, instance in live.items():
            b = batches[number]
            asks = decide(round_, number, instance)
            factors = [factor(consumed + k * together, b) for k in range(period)]
            instance.round(number, stream, b, factors, outer)
            instance.asks = asks
        consumed += period * together
        seen.append({number: _copied(instance) for number, instance in live.items()})
    return seen, merges


def norm_test(
    instance: Instance, number: int, stream, m: int, count: int, eta: float, keep: float
) -> float:
    """The batch that the debiased norm test asks for, from `count` microbatches of m a region.

    At the anchor, which all regions share as a round begins. tr Sigma of one sample's gradient and
    ||g||^2 are averaged over rounds (weight `keep` of the past) before their ratio is taken.
    """
    data = stream(number, instance.used, m * count)
    traces, signals = [], []
    for x, y in zip(data["x"], data["y"]):
        grads = [
            flatten(gradient(instance.anchor, x[j * m : (j + 1) * m], y[j * m : (j + 1) * m]))
            for j in range(count)
        ]
        mean = np.mean(np.array(grads, np.float64), axis=0)
        spread = sum(float(np.sum((g - mean) ** 2)) for g in grads)
        traces.append(m * spread / (count - 1))
        signals.append(float(mean @ mean) - spread / (count - 1) / count)
    before = instance.memory or (0.0, 0.0)
    trace, signal = (
        keep * old + (1 - keep) * float(np.mean(new)) for old, new in zip(before, (traces, signals))
    )
    instance.memory = trace, signal
    return trace / (eta**2 * signal) if signal > 0 else 0.0


def merge_into(kept: Instance, lost: Instance) -> None:
    """x <- (b1 x1 + b2 x2) / (b1 + b2), moments alike; outer momentum: the survivor's."""
    b_kept, b_lost = kept.asks, lost.asks

    def mean(a, b):
        return np.asarray((b_kept * a + b_lost * b) / (b_kept + b_lost), np.float32)

    def trees(a, b):
        return {key: mean(a[key], b[key]) for key in a}

    kept.anchor = trees(kept.anchor, lost.anchor)
    pairs = list(zip(kept.regions.values, lost.regions.values))
    kept.regions.values = [trees(a, b) for a, b in pairs]
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
    anchor = copy_tree(instance.anchor)
    return Instance(anchor, momentum, regions, instance.asks, instance.used, instance.memory)
