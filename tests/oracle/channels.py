"""Methods that average selected values beside, or instead of, an outer step.

SPARTA, DES-LOC, and LOSCAR-SGD's landing (arXiv 2605.20866).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from oracle.loop import (
    Event,
    Regions,
    Trajectory,
    copy_tree,
    present_at,
    reduce_over,
    subtract,
    weights_at,
    zeros_like,
)
from oracle.problem import Tree

Entries = dict[str, np.ndarray]


@dataclass(frozen=True)
class Exchange:
    """Every `every` steps the mean of some values overwrites them, `delay` steps later.

    source: "params", or a field of the inner optimizer's state. entries: number of the exchange,
    from 0 -> flat indices of each array; None = all values. replay: whether a region keeps what it
    made since the send (LOSCAR): mean + (now - sent). Then an entry that is under way is not drawn.
    """

    name: str
    source: str = "params"
    every: int = 1
    delay: int = 0
    entries: Callable[[int], Entries] | None = None
    replay: bool = False

    def trees(self, regions: Regions) -> list[Tree]:
        """Each region's arrays, themselves: writing into them changes the region."""
        if self.source == "params":
            return regions.values
        return [state[self.source] for state in regions.states]

    def chosen(self, number: int, like: Tree) -> Entries:
        if self.entries is None:
            return {key: np.arange(value.size) for key, value in like.items()}
        return self.entries(number)


@dataclass
class Waiting:
    """A mean that is under way to the regions that took part in it."""

    exchange: Exchange
    sent: int
    mean: Tree
    entries: Entries
    regions: set[int]
    values: list[Tree]
    excluded: tuple[int, ...]


def run_channels(
    params: Tree,
    batches: dict,
    *,
    inner,
    exchanges: list[Exchange],
    period=None,
    outer=None,
    participants=None,
    weights=None,
    finish=False,
) -> Trajectory:
    """Inner step; means that arrive; values that leave; then, with `period`, DiLoCo's outer step.

    A region that sits out of an exchange keeps its values, and never receives that mean. One whose
    values are not finite does not count, and receives it. An anchor that a region adopts replaces
    all of its parameters, so that older means of parameters do not reach it any more.
    """
    steps, count = batches["x"].shape[:2]
    anchor, momentum = copy_tree(params), zeros_like(params)
    regions, waiting, run = Regions(params, inner, count), [], Trajectory()
    record = {"anchors": [anchor], "momentum": [momentum]}
    run.record(step=0, locals=regions.values, **record)
    for t in range(1, steps + 1):
        losses = regions.step(batches, t)
        present, shares = present_at(participants, t, count), weights_at(weights, t, count)
        for exchange in exchanges:
            for item in [w for w in waiting if w.exchange is exchange]:
                if t - item.sent == exchange.delay:
                    _arrive(item, regions, t, run)
                    waiting.remove(item)
            if t % exchange.every == 0:
                under_way = [w.entries for w in waiting if w.exchange is exchange]
                item = _leave(exchange, regions, t, present, shares, run, under_way)
                if item is not None and exchange.delay == 0:
                    _arrive(item, regions, t, run)
                elif item is not None:
                    waiting.append(item)
        if period is not None and t % period == 0:
            deltas = [subtract(anchor, regions.values[r]) for r in range(count)]
            reduced = reduce_over(deltas, present, shares)
            if reduced is not None:
                anchor, momentum = outer.step(anchor, reduced.mean, momentum)
                for r in present:
                    regions.values[r] = copy_tree(anchor)
                for item in waiting:
                    if item.exchange.source == "params":
                        item.regions -= set(present)
        record = {"anchors": [anchor], "momentum": [momentum]}
        run.record(step=t, locals=regions.values, losses=losses, **record)
    if finish:
        everyone, shares = tuple(range(count)), weights_at(weights, steps, count)
        if period is None:
            anchor = reduce_over(regions.values, everyone, shares).mean
        else:
            deltas = [subtract(anchor, regions.values[r]) for r in everyone]
            reduced = reduce_over(deltas, everyone, shares)
            anchor, momentum = outer.step(anchor, reduced.mean, momentum)
        local = [copy_tree(anchor) for _ in everyone]
        run.record_finished(step=steps, anchors=[anchor], locals=local, momentum=[momentum])
    return run


def _leave(exchange, regions, t, present, shares, run, under_way) -> Waiting | None:
    """Average what leaves now; None if nobody takes part."""
    if not present:
        return None
    trees = exchange.trees(regions)
    entries = exchange.chosen(t // exchange.every - 1, trees[0])
    if exchange.replay:
        for others in under_way:
            entries = {key: np.setdiff1d(index, others[key]) for key, index in entries.items()}
    values = [{key: np.ravel(tree[key])[index] for key, index in entries.items()} for tree in trees]
    reduced = reduce_over(values, present, shares)
    excluded = present if reduced is None else reduced.excluded
    run.events.append(Event(t, f"send {exchange.name}", 0, 0, present, excluded))
    mean = None if reduced is None else reduced.mean
    return Waiting(exchange, t, mean, entries, set(present), values, tuple(excluded))


def _arrive(item: Waiting, regions: Regions, t: int, run: Trajectory) -> None:
    """Overwrite the entries of those who wait.

    With `replay` each adds what it made since; one that was left out has nothing to add to.
    """
    if item.regions:
        who = tuple(sorted(item.regions))
        run.events.append(Event(t, f"land {item.exchange.name}", 0, t - item.sent, who))
    if item.mean is None:
        return
    trees = item.exchange.trees(regions)
    for r in item.regions:
        for key, index in item.entries.items():
            flat = np.ravel(trees[r][key]).copy()
            made = flat[index] - item.values[r][key]
            keeps = item.exchange.replay and r not in item.excluded
            flat[index] = item.mean[key] + made if keeps else item.mean[key]
            trees[r][key] = flat.reshape(trees[r][key].shape)
