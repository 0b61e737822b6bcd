"""What every run shares: regions that train, the reduction over them, and the record kept."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from oracle.problem import Tree, gradient, loss


@dataclass(frozen=True)
class Event:
    """One thing that happened, in the order it happened.

    kind: "send", "land", "empty" (a one-period method's boundary at which nothing is due),
    "skip" (nobody took part), "drain" and "final" (inside finish). fragment is 0 for the whole
    model. staleness = landing step - send step (0 in a send). regions: who sent, or whose local
    values landed. excluded: senders whose contribution was not finite.
    """

    step: int
    kind: str
    fragment: int
    staleness: int
    regions: tuple[int, ...]
    excluded: tuple[int, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """The state after one step.

    anchors and momentum: one tree if shared, else one per region. locals: one tree per region.
    in_flight: (fragment, send step, regions still to land) in send order. losses: per region,
    at this step's batch before its update. extra: what only one method has.
    """

    step: int
    anchors: tuple[Tree, ...]
    locals: tuple[Tree, ...]
    momentum: tuple[Tree, ...]
    in_flight: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    losses: tuple[float, ...] = ()
    extra: dict = field(default_factory=dict)


class Trajectory:
    """The whole run: `at(0)` is the start, `at(t)` the state after step t, `finished` the end."""

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []
        self.events: list[Event] = []
        self.finished: Snapshot | None = None

    def at(self, step: int) -> Snapshot:
        return self.snapshots[step]

    @property
    def last(self) -> Snapshot:
        return self.snapshots[-1]

    def of(self, *kinds: str) -> list[Event]:
        """Return the events of these kinds."""
        return [event for event in self.events if event.kind in kinds]

    def record(self, **fields) -> None:
        """Copy the state of one step into the record."""
        self.snapshots.append(_snapshot(**fields))

    def record_finished(self, **fields) -> None:
        """Copy the state after finish into the record."""
        self.finished = _snapshot(**fields)


def _snapshot(*, step, anchors, locals, momentum, in_flight=(), losses=(), extra=None) -> Snapshot:
    return Snapshot(
        step=step,
        anchors=tuple(copy_tree(tree) for tree in anchors),
        locals=tuple(copy_tree(tree) for tree in locals),
        momentum=tuple(copy_tree(tree) for tree in momentum),
        in_flight=tuple(in_flight),
        losses=tuple(losses),
        extra=dict(extra or {}),
    )


class Regions:
    """R replicas that start equal and train alone; optimizer states stay private and are kept."""

    def __init__(self, params: Tree, inner, count: int):
        self.inner = inner
        self.values = [copy_tree(params) for _ in range(count)]
        self.states = [inner.init(params) for _ in range(count)]

    def step(self, batches: dict, step: int, active: Sequence[bool] | None = None) -> list[float]:
        """Make one inner step in every (active) region; return the losses before it."""
        losses = []
        for r in range(len(self.values)):
            if active is not None and not active[r]:
                losses.append(float("nan"))
                continue
            x, y = batches["x"][step - 1, r], batches["y"][step - 1, r]
            losses.append(float(loss(self.values[r], x, y)))
            grads = gradient(self.values[r], x, y)
            self.values[r], self.states[r] = self.inner.step(self.values[r], grads, self.states[r])
        return losses


@dataclass(frozen=True)
class Reduced:
    """A reduction over regions: the mean, each region's share of it, and who was left out."""

    mean: Tree
    shares: tuple[float, ...]
    excluded: tuple[int, ...]


def copy_tree(tree: Tree) -> Tree:
    """Copy every array."""
    return {key: np.array(value) for key, value in tree.items()}


def zeros_like(tree: Tree) -> Tree:
    """Return zeros in the shapes of `tree`."""
    return {key: np.zeros_like(value) for key, value in tree.items()}


def take(tree: Tree, keys: Sequence[str]) -> Tree:
    """Copy the arrays of one fragment."""
    return {key: np.array(tree[key]) for key in keys}


def subtract(left: Tree, right: Tree) -> Tree:
    """Return left - right, over the keys of `right`."""
    return {key: np.asarray(left[key] - right[key]) for key in right}


def is_finite(tree: Tree) -> bool:
    """Say whether every number is finite."""
    return all(bool(np.all(np.isfinite(value))) for value in tree.values())


def present_at(participants, step: int, count: int) -> tuple[int, ...]:
    """Return the regions that take part at 1-based `step`; None = everybody, always."""
    if participants is None:
        return tuple(range(count))
    return tuple(r for r in range(count) if participants[step - 1][r])


def weights_at(weights, step: int, count: int) -> tuple[float, ...]:
    """Return R weights: None = equal, [R] = constant, [steps, R] = those of 1-based `step`."""
    if weights is None:
        return (1.0,) * count
    array = np.asarray(weights, dtype=np.float64)
    row = array if array.ndim == 1 else array[step - 1]
    return tuple(float(weight) for weight in row)


def reduce_over(values: Sequence[Tree], present: Sequence[int], weights) -> Reduced | None:
    """Average over the regions present, in region order, leaving out what is not finite.

    Returns None when nothing is left to average: the caller then lands nothing.
    """
    excluded = tuple(r for r in present if not is_finite(values[r]))
    used = [r for r in present if r not in excluded]
    total = 0.0
    for r in used:
        total += weights[r]
    if total == 0.0:
        return None
    mean = zeros_like(values[0])
    for r in used:
        for key in mean:
            mean[key] = np.asarray(mean[key] + weights[r] * values[r][key])
    mean = {key: np.asarray(value / total) for key, value in mean.items()}
    shares = tuple(weights[r] / total if r in used else 0.0 for r in range(len(values)))
    return Reduced(mean, shares, excluded)
