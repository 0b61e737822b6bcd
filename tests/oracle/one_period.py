"""Methods that land one whole round late: eager, and DiLoCoX without a codec, the naive delay.

At a boundary the new pseudo-gradient is measured (send) before the late payload moves the anchor
(land). The reset of the local values belongs to the send of that boundary: a region that sits out
has not sent its progress and keeps its values; one that sent must be reset, or its progress would
be counted again one round later.
"""

from collections.abc import Sequence

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


def boundaries(period: int | Sequence[int], steps: int) -> list[int]:
    """Return the last step of each round; a list gives H per round, its last entry repeats."""
    lengths = [period] if isinstance(period, int) else list(period)
    ends, end, n = [], 0, 0
    while end + lengths[min(n, len(lengths) - 1)] <= steps:
        end += lengths[min(n, len(lengths) - 1)]
        ends.append(end)
        n += 1
    return ends


def _eager_gradient(late_mean: Tree | None, fresh_part: Tree, late_part: Tree) -> Tree:
    """Return g = late mean + (fresh own part - late own part), the parts already weighted."""
    g = {}
    for key in fresh_part:
        others = 0.0 if late_mean is None else late_mean[key]
        g[key] = np.asarray(others + (fresh_part[key] - late_part[key]))
    return g


def _own_part(reduced, region: int, own: Tree) -> Tree:
    """Return share * own pseudo-gradient; zeros for a region that is not in the mean."""
    if reduced is None or reduced.shares[region] == 0:
        return zeros_like(own)
    return {key: np.asarray(reduced.shares[region] * own[key]) for key in own}


def run_eager(
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
    """Run eager updates (arXiv 2502.12996, Algorithm 3): per-region anchor and momentum.

    g_m = late mean - (share of m in it) * own late part + (share of m now) * own fresh part.
    Exactly what was added as the fresh part is subtracted one round later. The share is that of
    the round the part belongs to (1/M when all take part), 0 for a region that sits out.
    """
    steps, count = batches["x"].shape[:2]
    anchors = [copy_tree(params) for _ in range(count)]
    momenta = [zeros_like(params) for _ in range(count)]
    regions = Regions(params, inner, count)
    added = [zeros_like(params) for _ in range(count)]
    late, late_sent, late_from = None, 0, ()
    run = Trajectory()
    run.record(step=0, anchors=anchors, locals=regions.values, momentum=momenta)
    for t in range(1, steps + 1):
        losses = regions.step(batches, t)
        if t % period == 0:
            present = present_at(participants, t, count)
            own = [subtract(anchors[r], regions.values[r]) for r in range(count)]
            fresh = reduce_over(own, present, weights_at(weights, t, count))
            run.events.append(_send_event(t, present, fresh))
            if late is None:
                run.events.append(Event(t, "empty", 0, 0, present))
            else:
                run.events.append(Event(t, "land", 0, t - late_sent, present))
            for r in range(count):
                if late is None and fresh is None:
                    break
                fresh_part = _own_part(fresh, r, own[r])
                g = _eager_gradient(None if late is None else late.mean, fresh_part, added[r])
                added[r] = fresh_part
                anchors[r], momenta[r] = outer.step(anchors[r], g, momenta[r])
                if r in present:
                    regions.values[r] = copy_tree(anchors[r])
            late, late_sent, late_from = fresh, t, present
        run.record(
            step=t,
            anchors=anchors,
            locals=regions.values,
            momentum=momenta,
            in_flight=[] if late is None else [(0, late_sent, tuple(range(count)))],
            losses=losses,
            extra={"own_in_flight": [copy_tree(tree) for tree in added]},
        )
    if finish:
        waiting = None if late is None else (late_sent, late.mean, late_from)
        row = weights_at(weights, steps, count)
        _finish_eager(run, regions, anchors, momenta, outer, waiting, added, steps, row)
    return run


def _finish_eager(run, regions, anchors, momenta, outer, waiting, added, step, weights):
    """Synchronise once more, blocking; what waits lands before, its own parts subtracted.

    A payload of this very step lands, and those who sent it are done. One of an earlier boundary
    lands at one more boundary, which adds the fresh parts. What was not added is not subtracted.
    """
    everyone, done = tuple(range(len(anchors))), ()

    def move(mean, parts, subtracted, who):
        for r in everyone:
            g = _eager_gradient(mean, parts[r], subtracted[r])
            anchors[r], momenta[r] = outer.step(anchors[r], g, momenta[r])
            if r in who:
                regions.values[r] = copy_tree(anchors[r])

    nothing = [zeros_like(anchors[0]) for _ in everyone]
    at_once = waiting is not None and waiting[0] == step
    if at_once:
        _, mean, done = waiting
        move(mean, nothing, added, done)
        run.events.append(Event(step, "drain", 0, 0, done))
    if set(done) != set(everyone):
        own = [subtract(anchors[r], regions.values[r]) for r in everyone]
        last, parts = reduce_over(own, everyone, weights), nothing
        if waiting is not None and not at_once:
            parts = [_own_part(last, r, own[r]) for r in everyone]
            move(waiting[1], parts, added, everyone)
            run.events.append(Event(step, "land", 0, step - waiting[0], everyone))
        if last is not None:
            move(last.mean, nothing, parts, everyone)
            run.events.append(Event(step, "final", 0, 0, everyone, last.excluded))
    run.record_finished(step=step, anchors=anchors, locals=regions.values, momentum=momenta)


def _send_event(step, present, reduced) -> Event:
    if reduced is None:
        return Event(step, "skip", 0, 0, present)
    return Event(step, "send", 0, 0, present, reduced.excluded)


def run_dilocox_dense(
    params: Tree,
    batches: dict,
    *,
    period: int | Sequence[int],
    inner,
    outer,
    delay: int = 1,
    first_round: str = "empty",
    participants=None,
    weights=None,
    finish=False,
) -> Trajectory:
    """Run DiLoCoX's one-step delay (arXiv 2506.21263) with nothing compressed.

    It is the naive delayed baseline of arXiv 2502.12996, Algorithm 2.

    The payload of a round lands at the next boundary, after that boundary's send. Nothing is due
    at the first one: all restart from the unmoved anchor. first_round="blocking" lands the first
    payload at once, so that it is the second boundary which has nothing due. delay=0 is DiLoCo.
    `period`: H, or a list with the H of each round.
    """
    if delay not in (0, 1) or first_round not in ("empty", "blocking"):
        raise ValueError(f"delay={delay} (0 or 1), first_round={first_round!r} (empty, blocking)")
    steps, count = batches["x"].shape[:2]
    ends = boundaries(period, steps)
    anchor, momentum = copy_tree(params), zeros_like(params)
    regions = Regions(params, inner, count)
    in_flight: tuple[int, Tree, tuple[int, ...]] | None = None
    run = Trajectory()
    run.record(step=0, anchors=[anchor], locals=regions.values, momentum=[momentum])
    for t in range(1, steps + 1):
        losses = regions.step(batches, t)
        if t in ends:
            present = present_at(participants, t, count)
            deltas = [subtract(anchor, regions.values[r]) for r in range(count)]
            reduced = reduce_over(deltas, present, weights_at(weights, t, count))
            payload = None if reduced is None else (t, reduced.mean, present)
            run.events.append(_send_event(t, present, reduced))
            at_once = delay == 0 or (first_round == "blocking" and t == ends[0])
            if at_once:
                landing = payload
            else:
                landing, in_flight = in_flight, payload
            if landing is not None:
                sent, mean, _ = landing
                anchor, momentum = outer.step(anchor, mean, momentum)
                run.events.append(Event(t, "land", 0, t - sent, present))
            elif not at_once:
                run.events.append(Event(t, "empty", 0, 0, present))
            if landing is not None or not at_once:
                for r in present:
                    regions.values[r] = copy_tree(anchor)
        flights = [] if in_flight is None else [(0, in_flight[0], tuple(range(count)))]
        run.record(
            step=t,
            anchors=[anchor],
            locals=regions.values,
            momentum=[momentum],
            in_flight=flights,
            losses=losses,
        )
    if finish:
        _finish_shared(run, regions, anchor, momentum, outer, in_flight, steps, weights)
    return run


def _finish_shared(run, regions, anchor, momentum, outer, waiting, step, weights):
    """Synchronise once more, blocking, for one anchor shared by all; what waits lands before.

    `waiting`: (step of the send, mean, who sent), or None. A payload of this very step lands, and
    those who sent it are done. One of an earlier boundary lands at one more boundary, behind that
    boundary's send: what was made since hands itself in.
    """
    everyone, done = tuple(range(len(regions.values))), ()
    at_once = waiting is not None and waiting[0] == step
    if at_once:
        _, mean, done = waiting
        anchor, momentum = outer.step(anchor, mean, momentum)
        for r in done:
            regions.values[r] = copy_tree(anchor)
        run.events.append(Event(step, "drain", 0, 0, done))
    if set(done) != set(everyone):
        deltas = [subtract(anchor, regions.values[r]) for r in everyone]
        last = reduce_over(deltas, everyone, weights_at(weights, step, len(everyone)))
        if waiting is not None and not at_once:
            anchor, momentum = outer.step(anchor, waiting[1], momentum)
            run.events.append(Event(step, "land", 0, step - waiting[0], everyone))
        if last is not None:
            anchor, momentum = outer.step(anchor, last.mean, momentum)
            regions.values = [copy_tree(anchor) for _ in everyone]
            run.events.append(Event(step, "final", 0, 0, everyone, last.excluded))
    run.record_finished(step=step, anchors=[anchor], locals=regions.values, momentum=[momentum])
