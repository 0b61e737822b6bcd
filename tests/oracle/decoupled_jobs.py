"""Learners that are jobs of their own (arXiv 2604.21428), replayed from what they and records say.

Every learner is simulated apart, with an anchor and a momentum of its own. They share payloads
alone: a learner lands a round once all who were admitted have reported to it. When that was is
read from their logs, and who was admitted from the commit records; nothing else is.
"""

from dataclasses import dataclass, field

import numpy as np

from oracle.loop import Regions, copy_tree, subtract, take, zeros_like
from oracle.problem import Tree


@dataclass
class JobLearner:
    """One learner; step: inner steps made. received, tokens: of each fragment, at its landing."""

    anchor: Tree
    momentum: Tree
    todo: list[tuple[int, str, int]]
    step: int = 0
    received: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, float] = field(default_factory=dict)


def run_learner_jobs(params, batches, logs, steps, admitted, *, fragments, merge, inner, outer):
    """Replay a run.

    logs: of each learner [(own step, "report" or "land", round)], in order. steps: inner steps
    that each has made in all. admitted: of each round, the regions in its record. merge: of
    `oracle.merging`.

    Returns (anchors, values, momenta) of all learners, after the last synchronisation, in which
    everyone takes part; and the anchors from before it.
    """
    count, samples = len(logs), batches["x"].shape[2]
    regions = Regions(params, inner, count)
    learners = [JobLearner(copy_tree(params), zeros_like(params), list(log)) for log in logs]
    for one in learners:
        one.received = dict.fromkeys(range(len(fragments)), 0)
        one.tokens = dict.fromkeys(range(len(fragments)), 0.0)
    payloads: dict[int, dict[int, tuple[Tree, float]]] = {}

    def train(r: int, until: int) -> None:
        one = learners[r]
        while one.step < until:
            one.step += 1
            regions.step(batches, one.step, [q == r for q in range(count)])
            for p in one.tokens:
                one.tokens[p] += samples

    def report(r: int, p: int) -> tuple[Tree, float]:
        one, keys = learners[r], fragments[p]
        c_steps = max(one.step - one.received[p], 1)
        delta = subtract(one.anchor, take(regions.values[r], keys))
        return delta, one.tokens[p] * one.tokens[p] / c_steps

    def land(r: int, p: int, sent: list[tuple[Tree, float]]) -> None:
        one, keys = learners[r], fragments[p]
        deltas, weights = [delta for delta, _ in sent], [weight for _, weight in sent]
        if sum(weights) > 0:
            direction = merge(deltas, weights, take(one.momentum, keys))
            new, v = outer.step(take(one.anchor, keys), direction, take(one.momentum, keys))
            one.anchor.update(new)
            one.momentum.update(v)
        regions.values[r].update(take(one.anchor, keys))
        one.received[p], one.tokens[p] = one.step, 0.0

    moving = True
    while moving:
        moving = False
        for r, one in enumerate(learners):
            while one.todo:
                at, kind, number = one.todo[0]
                sent = payloads.get(number, {})
                if kind == "land" and not set(admitted[number]) <= sent.keys():
                    break
                train(r, at)
                p = number % len(fragments)
                if kind == "report":
                    payloads.setdefault(number, {})[r] = report(r, p)
                else:
                    land(r, p, [sent[q] for q in sorted(admitted[number])])
                one.todo.pop(0)
                moving = True
    left = [one.todo for one in learners if one.todo]
    assert not left, f"a round lands that those admitted never reported to: {left}"
    for r in range(count):
        train(r, steps[r])
    before = [copy_tree(one.anchor) for one in learners]
    for p in range(len(fragments)):
        sent = [report(r, p) for r in range(count)]
        news = any(np.any(delta[k] != 0) for delta, w in sent if w > 0 for k in delta)
        for r in range(count):
            land(r, p, sent if news else [])
    anchors, momenta = [one.anchor for one in learners], [one.momentum for one in learners]
    return anchors, regions.values, momenta, before
