"""Methods that stop and wait: data parallel, local SGD, DiLoCo and SNOO."""

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
from oracle.problem import Tree, gradient, loss


def run_ddp(
    params: Tree, batches: dict, *, inner, participants=None, weights=None, finish=False
) -> Trajectory:
    """Average gradients every step and apply one shared inner optimizer to the anchor.

    All gradients and losses are taken at the anchor. A region that sits out keeps its old values
    until it takes part again. Nobody: the optimizer state does not move.
    """
    steps, count = batches["x"].shape[:2]
    anchor, state = copy_tree(params), inner.init(params)
    local = [copy_tree(params) for _ in range(count)]
    run = Trajectory()
    zero = [zeros_like(params)]
    run.record(step=0, anchors=[anchor], locals=local, momentum=zero)
    for t in range(1, steps + 1):
        losses, grads = [], []
        for r in range(count):
            x, y = batches["x"][t - 1, r], batches["y"][t - 1, r]
            losses.append(float(loss(anchor, x, y)))
            grads.append(gradient(anchor, x, y))
        present = present_at(participants, t, count)
        reduced = reduce_over(grads, present, weights_at(weights, t, count))
        if reduced is None:
            run.events.append(Event(t, "skip", 0, 0, present))
        else:
            run.events.append(Event(t, "send", 0, 0, present, reduced.excluded))
            anchor, state = inner.step(anchor, reduced.mean, state)
            for r in present:
                local[r] = copy_tree(anchor)
            run.events.append(Event(t, "land", 0, 0, present))
        run.record(step=t, anchors=[anchor], locals=local, momentum=zero, losses=losses)
    if finish:
        local = [copy_tree(anchor) for _ in range(count)]
        run.record_finished(step=steps, anchors=[anchor], locals=local, momentum=zero)
    return run


def run_local_sgd(
    params: Tree,
    batches: dict,
    *,
    period: int,
    inner,
    participants=None,
    weights=None,
    finish=False,
) -> Trajectory:
    """Replace everybody by the (weighted) mean of the parameters every `period` steps.

    Written as FedAvg writes it, a mean of parameters; equal to DiLoCo with outer lr 1 and no
    momentum up to rounding.
    """
    steps, count = batches["x"].shape[:2]
    anchor = copy_tree(params)
    regions = Regions(params, inner, count)
    run = Trajectory()
    zero = [zeros_like(params)]
    run.record(step=0, anchors=[anchor], locals=regions.values, momentum=zero)
    for t in range(1, steps + 1):
        losses = regions.step(batches, t)
        if t % period == 0:
            present = present_at(participants, t, count)
            reduced = reduce_over(regions.values, present, weights_at(weights, t, count))
            if reduced is None:
                run.events.append(Event(t, "skip", 0, 0, present))
            else:
                run.events.append(Event(t, "send", 0, 0, present, reduced.excluded))
                anchor = reduced.mean
                for r in present:
                    regions.values[r] = copy_tree(anchor)
                run.events.append(Event(t, "land", 0, 0, present))
        run.record(step=t, anchors=[anchor], locals=regions.values, momentum=zero, losses=losses)
    if finish:
        everyone = tuple(range(count))
        reduced = reduce_over(regions.values, everyone, weights_at(weights, steps, count))
        if reduced is not None:
            anchor = reduced.mean
            regions.values = [copy_tree(anchor) for _ in everyone]
            run.events.append(Event(steps, "final", 0, 0, everyone, reduced.excluded))
        run.record_finished(step=steps, anchors=[anchor], locals=regions.values, momentum=zero)
    return run


def run_diloco(
    params: Tree,
    batches: dict,
    *,
    period: int,
    inner,
    outer,
    participants=None,
    weights=None,
    finish=False,
) -> Trajectory:
    """Run DiLoCo (arXiv 2311.08105, Algorithm 1): H inner steps, then one outer step.

    A region that sits out keeps its local values while the anchor moves; its next
    pseudo-gradient is measured against the new anchor.
    """
    steps, count = batches["x"].shape[:2]
    anchor, momentum = copy_tree(params), zeros_like(params)
    regions = Regions(params, inner, count)
    run = Trajectory()
    run.record(step=0, anchors=[anchor], locals=regions.values, momentum=[momentum])
    for t in range(1, steps + 1):
        losses = regions.step(batches, t)
        if t % period == 0:
            present = present_at(participants, t, count)
            deltas = [subtract(anchor, regions.values[r]) for r in range(count)]
            reduced = reduce_over(deltas, present, weights_at(weights, t, count))
            if reduced is None:
                run.events.append(Event(t, "skip", 0, 0, present))
                momentum = outer.missed(momentum) if hasattr(outer, "missed") else momentum
            else:
                run.events.append(Event(t, "send", 0, 0, present, reduced.excluded))
                anchor, momentum = outer.step(anchor, reduced.mean, momentum)
                for r in present:
                    regions.values[r] = copy_tree(anchor)
                run.events.append(Event(t, "land", 0, 0, present))
        run.record(
            step=t, anchors=[anchor], locals=regions.values, momentum=[momentum], losses=losses
        )
    if finish:
        everyone = tuple(range(count))
        deltas = [subtract(anchor, regions.values[r]) for r in everyone]
        reduced = reduce_over(deltas, everyone, weights_at(weights, steps, count))
        if reduced is not None:
            anchor, momentum = outer.step(anchor, reduced.mean, momentum)
            regions.values = [copy_tree(anchor) for _ in everyone]
            run.events.append(Event(steps, "final", 0, 0, everyone, reduced.excluded))
        run.record_finished(
            step=steps, anchors=[anchor], locals=regions.values, momentum=[momentum]
        )
    return run


def run_snoo(
    params: Tree, batches: dict, *, period: int, inner, lr: float, momentum: float
) -> Trajectory:
    """Run SNOO (arXiv 2510.15830) on slow and fast weights; s is a mean where workers are several.

    s = w_slow - w_fast after every `period` steps; b <- mu b + s; w_slow <- w_slow - lr (mu b + s).
    """
    steps, count = batches["x"].shape[:2]
    slow, b = copy_tree(params), zeros_like(params)
    fast = Regions(params, inner, count)
    run = Trajectory()
    run.record(step=0, anchors=[slow], locals=fast.values, momentum=[b])
    for t in range(1, steps + 1):
        losses = fast.step(batches, t)
        if t % period == 0:
            for key in slow:
                s = sum(slow[key] - one[key] for one in fast.values) / count
                b[key] = momentum * b[key] + s
                slow[key] = np.asarray(slow[key] - lr * (momentum * b[key] + s))
            fast.values = [copy_tree(slow) for _ in range(count)]
        run.record(step=t, anchors=[slow], locals=fast.values, momentum=[b], losses=losses)
    return run
