"""Regions of different speed and a server: asynchronous local SGD (Delayed Nesterov), HeLoCo."""

import math
from collections.abc import Sequence
from fractions import Fraction

from oracle.loop import Event, Regions, Trajectory, copy_tree, subtract
from oracle.outer import DelayedNesterovServer, HeLoCoServer
from oracle.problem import Tree


def local_steps(speeds: Sequence[float], period: int, dynamic: bool = True) -> list[int]:
    """Return the inner steps between two arrivals: floor(v / max v * H), at least 1 (DyLU)."""
    if not dynamic:
        return [period] * len(speeds)
    exact = [Fraction(str(v)) for v in speeds]
    return [max(1, math.floor(v / max(exact) * period)) for v in exact]


def active_at(speeds: Sequence[float], step: int) -> list[bool]:
    """Say which regions complete an inner step in tick `step` (1-based).

    The fastest region makes one inner step a tick, a region of speed v floor(t v / max v) steps
    in t ticks.
    """
    exact = [Fraction(str(v)) for v in speeds]
    rates = [v / max(exact) for v in exact]
    return [math.floor(step * rate) > math.floor((step - 1) * rate) for rate in rates]


def run_async_local_sgd(
    params: Tree,
    batches: dict,
    *,
    period: int,
    inner,
    speeds: Sequence[float],
    lr: float,
    momentum: float = 0.9,
    buffer: int | None = None,
    c: float = 0.0,
    dynamic: bool = True,
    finish=False,
) -> Trajectory:
    """Run asynchronous local SGD (arXiv 2401.09135): Delayed Nesterov, dynamic local updates.

    One step of the record is one tick (an inner step of the fastest region); a region that is not
    active leaves its batch unused. A region arrives when it has made its number of inner steps
    since it last received the model; its pseudo-gradient is received model - local model. All
    arrivals of a tick are applied in region order, then everyone who arrived gets the newest
    model. Staleness = ticks since the model was received. `buffer` N defaults to the number of
    regions. finish: everybody who
    has made a step since arrives once more, in region order.
    """
    n = batches["x"].shape[1] if buffer is None else buffer
    server = DelayedNesterovServer(params, lr=lr, momentum=momentum, buffer=n, c=c)

    def extra():
        return {"pending": copy_tree(server.pending), "arrivals": server.arrivals}

    return _run(server, params, batches, period, inner, speeds, dynamic, finish, extra)


def run_heloco(
    params: Tree,
    batches: dict,
    *,
    period: int,
    inner,
    speeds: Sequence[float],
    lr: float,
    momentum: float,
    rho: float,
    align,
    dynamic: bool = False,
    finish=False,
) -> Trajectory:
    """Run HeLoCo (arXiv 2606.00271): arrivals aligned by `align`, a look-ahead handed out.

    `align`: of `oracle.merging`. Ticks and arrivals as in `run_async_local_sgd`; whoever arrived
    gets the newest look-ahead, against which the next pseudo-gradient is measured. finish: everyone
    ends on the model itself.
    """
    server = HeLoCoServer(params, lr=lr, momentum=momentum, rho=rho, align=align)
    return _run(server, params, batches, period, inner, speeds, dynamic, finish, dict)


def _run(server, params, batches, period, inner, speeds, dynamic, finish, extra) -> Trajectory:
    steps, count = batches["x"].shape[:2]
    regions = Regions(params, inner, count)
    received = [copy_tree(params) for _ in range(count)]
    received_at, made = [0] * count, [0] * count
    target = local_steps(speeds, period, dynamic)
    run = Trajectory()

    def arrive(step, arrived, kind):
        for r in arrived:
            delta = subtract(received[r], regions.values[r])
            if kind == "final" and not any(value.any() for value in delta.values()):
                continue  # nothing was learned since it received the model
            server.arrive(delta)
            run.events.append(Event(step, kind, 0, step - received_at[r], (r,)))
        for r in arrived:
            given = server.theta if kind == "final" else server.handed_out()
            received[r], regions.values[r] = copy_tree(given), copy_tree(given)
            received_at[r], made[r] = step, 0

    def fields(step, losses=()):
        return {
            "step": step,
            "anchors": [server.theta],
            "locals": regions.values,
            "momentum": [server.momentum],
            "losses": losses,
            "extra": {"received": [copy_tree(tree) for tree in received], **extra()},
        }

    run.record(**fields(0))
    for t in range(1, steps + 1):
        active = active_at(speeds, t)
        losses = regions.step(batches, t, active)
        for r in range(count):
            made[r] += int(active[r])
        arrive(t, [r for r in range(count) if active[r] and made[r] >= target[r]], "land")
        run.record(**fields(t, losses))
    if finish:
        arrive(steps, list(range(count)), "final")
        run.record_finished(**fields(steps))
    return run


def run_arrivals(server, params, batches: dict, arrivals, steps: Sequence[int], inner):
    """Apply arrivals in the order of their records: what regions that are jobs must end with.

    Every region trains on from what it was handed out at its last arrival; its pseudo-gradient is
    measured against that.

    Args:
      arrivals: (region, inner steps it had made until then), in their order.
      steps: inner steps that each region makes in all; those after its last arrival travel with
        the last synchronisation, in region order.

    Returns:
      (model, values of every region) before the last synchronisation, and the model after it.
    """
    regions = Regions(params, inner, len(steps))
    received = [copy_tree(params) for _ in steps]
    made = [0] * len(steps)

    def train(r: int, until: int) -> None:
        while made[r] < until:
            made[r] += 1
            regions.step(batches, made[r], [q == r for q in range(len(steps))])

    for r, at in arrivals:
        train(r, at)
        server.arrive(subtract(received[r], regions.values[r]))
        received[r] = copy_tree(server.handed_out())
        regions.values[r] = copy_tree(received[r])
    for r, at in enumerate(steps):
        train(r, at)
    before = copy_tree(server.theta), [copy_tree(x) for x in regions.values]
    for r in range(len(steps)):
        delta = subtract(received[r], regions.values[r])
        if any(value.any() for value in delta.values()):
            server.arrive(delta)
    return *before, copy_tree(server.theta)
