"""NoLoCo and GASLoC: every region has its own anchor and averages with a small group only."""

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


def run_noloco(
    params: Tree,
    batches: dict,
    *,
    period: int,
    groups: Sequence[Sequence[Sequence[int]]],
    alpha: float = 0.5,
    beta: float = 0.7,
    gamma: float = 0.7,
    inner,
    start_anchors: Sequence[Tree] | None = None,
    participants=None,
    weights=None,
    finish=False,
    last_groups: Sequence[Sequence[int]] | None = None,
) -> Trajectory:
    """Run NoLoCo (arXiv 2506.10911) in the heavy-ball form of its code.

    `groups[n]` = the groups (tuples of regions) of round n (0-based). In a group G of n:
    delta_i <- alpha delta_i - beta/n sum_G Delta_j - gamma (phi_i - 1/n sum_G phi_j);
    phi_i <- phi_i + delta_i; theta_i <- phi_i, with Delta_j = phi_j - theta_j. Both sums run over
    the members that take part. One that does not still moves its anchor by this rule and keeps
    its local values; a group nobody of which takes part does nothing. `start_anchors` gives the
    regions different starting points. finish: one round in which everybody takes part, in
    `last_groups` (default: everybody in one group).
    """
    steps, count = batches["x"].shape[:2]
    starts = [params] * count if start_anchors is None else list(start_anchors)
    phi = [copy_tree(tree) for tree in starts]
    delta = [zeros_like(params) for _ in range(count)]
    regions = Regions(params, inner, count)
    regions.values = [copy_tree(tree) for tree in starts]
    run = Trajectory()

    def exchange(t, group, here, row, kind):
        pseudo = [subtract(phi[r], regions.values[r]) for r in range(count)]
        reduced = reduce_over(pseudo, here, row)
        if reduced is None:
            run.events.append(Event(t, "skip", 0, 0, here))
            return
        senders = tuple(r for r in here if r not in reduced.excluded)
        mean_phi = reduce_over(phi, senders, row).mean
        for i in group:
            for key in params:
                pull = phi[i][key] - mean_phi[key]
                delta[i][key] = np.asarray(
                    alpha * delta[i][key] - beta * reduced.mean[key] - gamma * pull
                )
        for i in group:
            for key in params:
                phi[i][key] = np.asarray(phi[i][key] + delta[i][key])
        for i in here:
            regions.values[i] = copy_tree(phi[i])
        if kind == "land":
            run.events.append(Event(t, "send", 0, 0, here, reduced.excluded))
        run.events.append(Event(t, kind, 0, 0, here, reduced.excluded if kind == "final" else ()))

    run.record(step=0, anchors=phi, locals=regions.values, momentum=delta)
    for t in range(1, steps + 1):
        losses = regions.step(batches, t)
        if t % period == 0:
            present = present_at(participants, t, count)
            row = weights_at(weights, t, count)
            for group in groups[t // period - 1]:
                here = tuple(r for r in group if r in present)
                exchange(t, group, here, row, "land")
        run.record(step=t, anchors=phi, locals=regions.values, momentum=delta, losses=losses)
    if finish:
        row = weights_at(weights, steps, count)
        for group in [tuple(range(count))] if last_groups is None else last_groups:
            exchange(steps, group, group, row, "final")
        run.record_finished(step=steps, anchors=phi, locals=regions.values, momentum=delta)
    return run


def run_gasloc(
    params: Tree,
    batches: dict,
    *,
    periods: Sequence[int],
    groups: Sequence[Sequence[Sequence[int]]],
    alpha: float,
    gamma: float,
    rate: float,
    inner,
    participants=None,
    weights=None,
    finish=False,
    last_groups: Sequence[Sequence[int]] | None = None,
) -> Trajectory:
    """Run GASLoC (arXiv 2606.11081).

    u_i = theta_i + rate g_i, g_i = end - start of H_i local steps; theta_i <- u_i - alpha (u_i -
    mean_G u) + gamma (u_i - u_i of the round before), which is theta_0 at first. Region i makes its
    H_i = `periods[i]` steps in max H ticks, floor(t H_i / max H) of them in t; in other ticks it
    leaves its batch unused. Who takes no part keeps theta, u and its local values, and its group's
    mean is over the others. One whose values are not finite is left out, and takes its theta over.
    `groups`, finish: as in `run_noloco`.
    """
    steps, count = batches["x"].shape[:2]
    theta = [copy_tree(params) for _ in range(count)]
    before = [copy_tree(params) for _ in range(count)]
    regions, run, longest = Regions(params, inner, count), Trajectory(), max(periods)

    def exchange(t, group, here, row, kind):
        made = [subtract(regions.values[r], theta[r]) for r in range(count)]
        u = [{key: theta[r][key] + rate * made[r][key] for key in params} for r in range(count)]
        reduced = reduce_over(u, here, row)
        if reduced is not None:
            for i in here:
                if i in reduced.excluded:
                    continue
                for key in params:
                    pull = u[i][key] - reduced.mean[key]
                    moved = gamma * (u[i][key] - before[i][key])
                    theta[i][key] = np.asarray(u[i][key] - alpha * pull + moved)
                before[i] = copy_tree(u[i])
            for i in here:
                regions.values[i] = copy_tree(theta[i])
            run.events.append(Event(t, kind, 0, 0, here, reduced.excluded))

    run.record(step=0, anchors=theta, locals=regions.values, momentum=before)
    for t in range(1, steps + 1):
        active = [t * h // longest > (t - 1) * h // longest for h in periods]
        losses = regions.step(batches, t, active)
        if t % longest == 0:
            present, row = present_at(participants, t, count), weights_at(weights, t, count)
            for group in groups[t // longest - 1]:
                here = tuple(r for r in group if r in present)
                exchange(t, group, here, row, "land")
        run.record(step=t, anchors=theta, locals=regions.values, momentum=before, losses=losses)
    if finish:
        row = weights_at(weights, steps, count)
        for group in [tuple(range(count))] if last_groups is None else last_groups:
            exchange(steps, group, group, row, "final")
        run.record_finished(step=steps, anchors=theta, locals=regions.values, momentum=before)
    return run
