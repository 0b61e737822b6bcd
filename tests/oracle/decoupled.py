"""Decoupled DiLoCo (arXiv 2604.21428) in ticks, written out step by step.

The rounds are found by walking through time once, tick by tick, beside the training: no function of
the package is used, and none of its shapes.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from oracle.loop import Event, Regions, Trajectory, copy_tree, subtract, take, zeros_like
from oracle.problem import Tree


@dataclass
class OpenRound:
    """A round between its opening and its landing."""

    number: int
    fragment: int
    opened: int
    since: int  # reports count from the tick behind this one
    quorum: int | None = None
    window: int = 0
    closed: int | None = None
    lands: int | None = None
    direction: Tree | None = None
    admitted: tuple[int, ...] = ()


@dataclass
class Learner:
    """What one learner counts."""

    progress: float = 0.0
    steps: list[int] = field(default_factory=list)  # ticks in which it made a step
    tokens_since: dict[int, float] = field(default_factory=dict)
    steps_since: dict[int, int] = field(default_factory=dict)


def run_decoupled_diloco(
    params: Tree,
    batches: dict,
    *,
    fragments,
    period: int,
    overlap: int,
    quorum: int,
    grace: float,
    merge,
    inner,
    outer,
    speeds=None,
    outages=(),
    travel: int = 0,
    tokens=None,
) -> Trajectory:
    """Train; `tokens`: [steps, R] of each learner's step, None = the batch's samples.

    outages: (region, first tick, last tick). merge: of `oracle.merging`.
    """
    steps, count = batches["x"].shape[:2]
    samples = batches["x"].shape[2]
    speed = [1.0] * count if speeds is None else [v / max(speeds) for v in speeds]
    learners = [Learner() for _ in range(count)]
    for one in learners:
        one.tokens_since = dict.fromkeys(range(len(fragments)), 0.0)
        one.steps_since = dict.fromkeys(range(len(fragments)), 0)
    regions = Regions(params, inner, count)
    anchor, momentum = copy_tree(params), zeros_like(params)
    run = Trajectory()
    run.record(step=0, anchors=[anchor], locals=regions.values, momentum=[momentum])
    rounds: list[OpenRound] = []
    average = 0.0

    def down(r, t):
        return any(region == r and first <= t <= last for region, first, last in outages)

    def opening(number):
        """(tick of opening, None while its fragment is on its way; after which steps count)."""
        p = len(fragments)
        gap = (number + 1) * period // p - number * period // p
        opens = gap + (rounds[-1].opened if rounds else 0)
        if number >= p:
            before = rounds[number - p]
            if before.lands is None:
                return None, 0
            return max(opens, before.lands + 1), max(opens - gap, before.lands)
        return opens, opens - gap

    def land(t):
        for one in sorted((r for r in rounds if r.lands == t), key=lambda r: (r.closed, r.number)):
            keys = fragments[one.fragment]
            if not one.admitted:
                continue
            if one.direction is not None:
                new, v = outer.step(take(anchor, keys), one.direction, take(momentum, keys))
                anchor.update(new)
                momentum.update(v)
            receivers = tuple(r for r in range(count) if not down(r, t))
            for r in receivers:
                regions.values[r].update(take(anchor, keys))
                learners[r].tokens_since[one.fragment] = 0.0
                learners[r].steps_since[one.fragment] = 0
            one.lands = t
            run.events.append(Event(t, "land", one.fragment, t - one.closed, receivers))

    for t in range(1, steps + 1):
        active = []
        for r, one in enumerate(learners):
            before = math.floor(one.progress + 1e-9)
            one.progress += 0.0 if down(r, t) else speed[r]
            active.append(math.floor(one.progress + 1e-9) > before)
        regions.step(batches, t, active)
        for r, one in enumerate(learners):
            if active[r]:
                one.steps.append(t)
                for p in range(len(fragments)):
                    one.tokens_since[p] += samples if tokens is None else tokens[t - 1][r]
                    one.steps_since[p] += 1
        land(t)
        while True:
            opens, since = opening(len(rounds))
            if opens is None or opens > t:
                break
            number = len(rounds)
            rounds.append(OpenRound(number, number % len(fragments), opens, since))
        alive = [r for r in range(count) if not down(r, t)]

        def reported(one, t=t, alive=alive):
            return [r for r in alive if any(one.since < s <= t for s in learners[r].steps)]

        for one in rounds:
            if one.quorum is None:
                if len(reported(one)) < quorum:
                    break
                one.quorum = t
                slack = max(0.0, overlap - average - travel)
                one.window = math.floor(grace * slack + 1e-9)
                average = 0.9 * average + 0.1 * (t - one.opened)
        for one in rounds:
            if one.closed is not None:
                continue
            if one.quorum is None:
                break
            ready = reported(one)
            if len(ready) < len(alive) and t < one.quorum + one.window:
                break  # later rounds do not close before this one
            one.closed, one.admitted = t, tuple(ready)
            one.lands = max(one.quorum + overlap, t + travel)
            keys = fragments[one.fragment]
            deltas = [subtract(anchor, take(regions.values[r], keys)) for r in ready]
            weights = []
            for r in ready:
                c_tokens = learners[r].tokens_since[one.fragment]
                c_steps = learners[r].steps_since[one.fragment]
                weights.append(c_tokens * c_tokens / max(c_steps, 1))
            if sum(weights) > 0:
                one.direction = merge(deltas, weights, take(momentum, keys))
            run.events.append(Event(t, "send", one.fragment, 0, tuple(ready)))
        land_now = [r for r in rounds if r.lands == t and r.closed == t]
        if land_now:
            land(t)
        for r in range(count):
            if down(r, t) and not down(r, t + 1):
                peer = next(q for q in range(count) if not down(q, t))
                regions.values[r] = copy_tree(regions.values[peer])
                regions.states[r] = _copy_state(regions.states[peer])
                learners[r].tokens_since = dict.fromkeys(range(len(fragments)), 0.0)
                learners[r].steps_since = dict.fromkeys(range(len(fragments)), 0)
                run.events.append(Event(t, "recover", -1, 0, (r,)))
        run.record(step=t, anchors=[anchor], locals=regions.values, momentum=[momentum])
    return run


def _copy_state(state):
    if isinstance(state, dict):
        return {k: _copy_state(v) for k, v in state.items()}
    return np.array(state) if isinstance(state, np.ndarray) else state
