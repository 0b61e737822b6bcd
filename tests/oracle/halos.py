"""HALoS (arXiv 2506.04531): workers, a local server for each group, a global server; in ticks."""

import math
from fractions import Fraction

import numpy as np

from oracle.async_server import active_at
from oracle.loop import Event, Regions, Trajectory, copy_tree, subtract
from oracle.outer import DelayedNesterovServer
from oracle.problem import Tree


class LocalServer:
    """One group's server: a Delayed Nesterov model, and what it last agreed on with the global."""

    def __init__(self, params: Tree, **rule):
        self.server = DelayedNesterovServer(params, **rule)
        self.reference = copy_tree(params)
        self.version = self.merged_version = 0
        self.going_up: tuple[int, Tree] | None = None
        self.coming_down: tuple[int, Tree] | None = None


def run_halos(
    params: Tree,
    batches: dict,
    *,
    period: int,
    inner,
    speeds,
    groups,
    every: int,
    blend: float,
    local: dict,
    upper: dict,
    travel,
    finish=False,
    local_codec=None,
    upper_codec=None,
) -> Trajectory:
    """Train. local, upper: lr, momentum and buffer of the servers; travel: ticks one way, [G].

    local_codec, upper_codec: (share that is sent, decay of the residual), of every array; None =
    dense.
    """
    steps, count = batches["x"].shape[:2]
    group_of = {r: g for g, members in enumerate(groups) for r in members}
    exact = [Fraction(str(v)) for v in speeds]
    target = [math.ceil(period * v / max(exact)) for v in exact]
    regions = Regions(params, inner, count)
    received = [copy_tree(params) for _ in range(count)]
    made = [0] * count
    servers = [LocalServer(params, **local) for _ in groups]
    top = DelayedNesterovServer(params, **upper)
    run = Trajectory()

    def fields(step):
        return {
            "step": step,
            "anchors": [top.theta],
            "locals": regions.values,
            "momentum": [top.momentum],
            "extra": {"models": [copy_tree(s.server.theta) for s in servers]},
        }

    residuals: dict[tuple[str, int], Tree] = {}

    def decoded(codec, sender, delta):
        """What arrives of Delta from ("worker", r) or ("server", g)."""
        if codec is None or not any(x.any() for x in delta.values()):
            return delta
        share, decay = codec
        before = residuals.get(sender, {k: np.zeros_like(x) for k, x in delta.items()})
        whole = {k: delta[k] + before[k] for k in delta}
        sent = {k: share * x for k, x in whole.items()}
        residuals[sender] = {k: decay * (whole[k] - sent[k]) for k in delta}
        return sent

    def travelling(t):
        """What arrives at the global server, then what comes back from it."""
        for g, one in enumerate(servers):
            if one.going_up is not None and one.going_up[0] <= t:
                top.arrive(one.going_up[1])
                one.going_up = None
                one.coming_down = (t + travel[g], copy_tree(top.theta))
                run.events.append(Event(t, "global", 0, 0, (g,)))
        for g, one in enumerate(servers):
            if one.coming_down is not None and one.coming_down[0] <= t:
                theta = one.server.theta
                for key, value in one.coming_down[1].items():
                    theta[key] = np.asarray((1 - blend) * theta[key] + blend * value)
                one.reference, one.merged_version = copy_tree(theta), one.version
                one.coming_down = None
                run.events.append(Event(t, "merge", 0, 0, (g,)))

    def arrive(r, t):
        one = servers[group_of[r]]
        delta = subtract(received[r], regions.values[r])
        one.server.arrive(decoded(local_codec, ("worker", r), delta))
        one.version += 1
        waits = one.going_up is not None or one.coming_down is not None
        if one.version >= one.merged_version + every and not waits:
            g, news = group_of[r], subtract(one.reference, one.server.theta)
            one.going_up = (t + travel[g], decoded(upper_codec, ("server", g), news))
        received[r] = copy_tree(one.server.theta)
        regions.values[r] = copy_tree(one.server.theta)
        made[r] = 0
        run.events.append(Event(t, "land", 0, 0, (r,)))

    run.record(**fields(0))
    for t in range(1, steps + 1):
        active = active_at(speeds, t)
        regions.step(batches, t, active)
        for r in range(count):
            made[r] += int(active[r])
        travelling(t)
        for r in range(count):
            if active[r] and made[r] >= target[r]:
                arrive(r, t)
        travelling(t)
        run.record(**fields(t))
    if finish:
        # What travels arrives, everyone who has news arrives once more, and every server's news
        # goes up in group order; then everybody has the global model.
        travelling(math.inf)
        for r in range(count):
            delta = subtract(received[r], regions.values[r])
            if any(x.any() for x in delta.values()):
                servers[group_of[r]].server.arrive(decoded(local_codec, ("worker", r), delta))
        for g, one in enumerate(servers):
            news = subtract(one.reference, one.server.theta)
            if any(x.any() for x in news.values()):
                top.arrive(decoded(upper_codec, ("server", g), news))
        regions.values = [copy_tree(top.theta) for _ in range(count)]
        run.record_finished(**fields(steps))
    return run
