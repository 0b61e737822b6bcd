"""EDiT and A-EDiT (arXiv 2412.07210): weights of norms, outliers by a worker's own history, a clip.

Written from notes of the published code.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

from oracle.loop import (
    Event,
    Regions,
    Trajectory,
    copy_tree,
    is_finite,
    present_at,
    subtract,
    zeros_like,
)
from oracle.problem import Tree


class History:
    """Exponentially weighted mean and variance of one worker's norms of one tensor."""

    def __init__(self, decay: float):
        self.decay, self.mean, self.variance, self.rounds = decay, 0.0, 0.0, 0

    def note(self, norm: float) -> None:
        away = norm - self.mean
        self.mean += self.decay * away
        self.variance = (1 - self.decay) * (self.variance + self.decay * away * (norm - self.mean))
        self.rounds += 1

    def is_outlier(self, norm: float, threshold: float, warm_up: int) -> bool:
        far = norm - self.mean > threshold * math.sqrt(self.variance)
        return self.rounds >= warm_up and far


def run_edit(
    params: Tree,
    batches: dict,
    *,
    period: int,
    inner,
    outer,
    clip: float = 10.0,
    temperature: float = 1.0,
    outlier: float = 3.0,
    decay: float = 0.02,
    warm_up: int = 120,
    speeds: Sequence[float] | None = None,
    participants=None,
    finish=False,
) -> Trajectory:
    """Run EDiT; with `speeds` A-EDiT, whose rounds are `period` ticks of the fastest region.

    Tensor by tensor, of those that take part: who is an outlier counts nothing, and its norm does
    not enter its history. Weights are softmax(-norm / temperature) over the others; the direction
    is shortened to the norm `clip`. Where all are outliers, the tensor's anchor and momentum stay.
    Whoever took part takes the anchor. A region that has made no step since it last took part is
    absent.
    """
    steps, count = batches["x"].shape[:2]
    anchor, momentum = copy_tree(params), zeros_like(params)
    regions, run = Regions(params, inner, count), Trajectory()
    histories = [{key: History(decay) for key in params} for _ in range(count)]
    shares = [Fraction(1)] * count
    if speeds is not None:
        exact = [Fraction(str(v)) for v in speeds]
        shares = [v / max(exact) for v in exact]
    since = [0] * count  # steps made since the region last took part

    def exchange(t, here, kind):
        nonlocal anchor, momentum
        deltas = {r: subtract(anchor, regions.values[r]) for r in here}
        sound = [r for r in here if is_finite(deltas[r])]
        left_out = tuple(r for r in here if r not in sound)
        if sound:
            anchor, momentum = copy_tree(anchor), copy_tree(momentum)
            for key in params:
                norms = {
                    r: math.sqrt(float((deltas[r][key].astype(float) ** 2).sum())) for r in sound
                }
                good = []
                for r in sound:
                    if histories[r][key].is_outlier(norms[r], outlier, warm_up):
                        run.extra_outliers.append((t, key, r))
                        continue
                    histories[r][key].note(norms[r])
                    good.append(r)
                if not good:
                    continue
                least = min(norms[r] for r in good)
                weights = {r: math.exp((least - norms[r]) / temperature) for r in good}
                total = sum(weights.values())
                merged = sum(weights[r] / total * deltas[r][key] for r in good)
                length = math.sqrt(float((merged.astype(float) ** 2).sum()))
                if length > clip:
                    merged = merged * (clip / length)
                one = outer.step({key: anchor[key]}, {key: merged}, {key: momentum[key]})
                anchor[key], momentum[key] = one[0][key], one[1][key]
        for r in here:
            if sound:
                regions.values[r] = copy_tree(anchor)
            since[r] = 0
        run.events.append(Event(t, kind, 0, 0, tuple(here), left_out))

    run.extra_outliers = []
    run.record(step=0, anchors=[anchor], locals=regions.values, momentum=[momentum])
    for t in range(1, steps + 1):
        active = [math.floor(t * s) > math.floor((t - 1) * s) for s in shares]
        losses = regions.step(batches, t, active)
        since = [n + moved for n, moved in zip(since, active)]
        if t % period == 0:
            exchange(t, [r for r in present_at(participants, t, count) if since[r]], "land")
        run.record(
            step=t, anchors=[anchor], locals=regions.values, momentum=[momentum], losses=losses
        )
    if finish:
        exchange(steps, [r for r in range(count) if since[r]], "final")
        local = [copy_tree(anchor) for _ in range(count)]
        run.record_finished(step=steps, anchors=[anchor], locals=local, momentum=[momentum])
    return run
