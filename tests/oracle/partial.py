"""Partial parameter updates (arXiv 2509.22418), and SPES (arXiv 2602.11543).

A region trains some entries only. Written from notes on the first, and from the published code of
the second.
"""

import numpy as np

from oracle.loop import (
    Event,
    Regions,
    Trajectory,
    copy_tree,
    is_finite,
    present_at,
    subtract,
    weights_at,
    zeros_like,
)
from oracle.problem import Tree, gradient, loss


class PartlyTraining(Regions):
    """Regions that train the entries of their mask; a leaf without one is trained everywhere."""

    def __init__(self, params: Tree, inner, count: int, masks):
        super().__init__(params, inner, count)
        self.masks = masks

    def step(self, batches, step, active=None):
        losses = []
        for r in range(len(self.values)):
            x, y = batches["x"][step - 1, r], batches["y"][step - 1, r]
            before = self.values[r]
            losses.append(float(loss(before, x, y)))
            grads = {k: g * self.trains(r, k, g) for k, g in gradient(before, x, y).items()}
            new, self.states[r] = self.inner.step(before, grads, self.states[r])
            self.values[r] = {
                k: np.where(self.trains(r, k, v), new[k], v).astype(v.dtype)
                for k, v in before.items()
            }
        return losses

    def trains(self, r: int, key: str, like: np.ndarray) -> np.ndarray:
        """Say of every entry whether region r trains it."""
        whole = np.ones(like.shape, bool)
        return np.broadcast_to(self.masks[r].get(key, whole), like.shape)


def run_partial_updates(
    params: Tree,
    batches: dict,
    *,
    period: int,
    masks,
    inner,
    outer,
    after=None,
    participants=None,
    weights=None,
    finish=False,
) -> Trajectory:
    """Run DiLoCo in which region r trains the entries of `masks[r]` (leaf -> bool array).

    Entry by entry: the mean of Delta over the regions present that train it, then the outer rule.
    Where none does, the mean is 0 and momentum goes on. Whoever took part takes the anchor. `after`
    maps (anchor, step) to the anchor that is handed out; entries that nobody present trains stay.
    """
    steps, count = batches["x"].shape[:2]
    anchor, momentum = copy_tree(params), zeros_like(params)
    regions, run = PartlyTraining(params, inner, count, masks), Trajectory()

    def exchange(t, here, kind):
        nonlocal anchor, momentum
        w = weights_at(weights, t, count)
        deltas = {r: subtract(anchor, regions.values[r]) for r in here}
        sound = [r for r in here if is_finite(deltas[r])]
        if sound:
            mean, trained = zeros_like(params), {}
            for key in params:
                total = np.zeros(params[key].shape)
                for r in sound:
                    mask = regions.trains(r, key, params[key])
                    mean[key] = mean[key] + w[r] * mask * deltas[r][key]
                    total = total + w[r] * mask
                trained[key] = total > 0
                mean[key] = np.where(trained[key], mean[key] / np.where(total > 0, total, 1), 0)
            moved, new_momentum = outer.step(anchor, mean, momentum)
            if after is not None:
                handed = after(moved, t)
                moved = {k: np.where(trained[k], handed[k], anchor[k]) for k in anchor}
            anchor, momentum = moved, new_momentum
            for r in here:
                regions.values[r] = copy_tree(anchor)
        left_out = tuple(r for r in here if r not in sound)
        run.events.append(Event(t, kind, 0, 0, tuple(here), left_out))

    run.record(step=0, anchors=[anchor], locals=regions.values, momentum=[momentum])
    for t in range(1, steps + 1):
        losses = regions.step(batches, t)
        if t % period == 0:
            exchange(t, present_at(participants, t, count), "land")
        run.record(
            step=t, anchors=[anchor], locals=regions.values, momentum=[momentum], losses=losses
        )
    if finish:
        if steps % period or (participants is not None and not all(participants[steps - 1])):
            exchange(steps, range(count), "final")
        local = [copy_tree(anchor) for _ in range(count)]
        run.record_finished(step=steps, anchors=[anchor], locals=local, momentum=[momentum])
    return run


def merged_experts(
    anchor: Tree, step: int, *, layers, share: float, every: int, until: int, donors: int
) -> Tree:
    """Move every expert towards its most similar ones, where `step` is a multiple of `every`.

    `layers`: for each layer (leaves of [experts, ...], the one of them that is compared). All
    experts read the values from before.
    """
    alpha = share * (1 - step / until)
    if step % every or alpha <= 0:
        return anchor
    found = copy_tree(anchor)
    for leaves, compared in layers:
        rows = anchor[compared].astype(np.float64).reshape(len(anchor[compared]), -1)
        for e in range(len(rows)):
            cosine = {
                o: rows[o] @ rows[e] / (np.linalg.norm(rows[o]) * np.linalg.norm(rows[e]))
                for o in range(len(rows))
                if o != e
            }
            best = sorted(cosine, key=lambda o: -cosine[o])[:donors]
            for leaf in leaves:
                old = anchor[leaf]
                found[leaf][e] = old[e] + alpha * np.mean([old[o] - old[e] for o in best], axis=0)
    return found
