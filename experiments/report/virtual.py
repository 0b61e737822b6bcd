"""Replay the events of a run on a network of your choice, in virtual time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from experiments.cli import RefusedError, problems_of, refuse_any
from experiments.report.runlog import RunLog, nominal_steps, summarise
from lowcomm_jax.network import (
    ClockReport,
    Network,
    Timeline,
    VirtualClock,
    every_step,
    parse,
    replay,
)

StepSeconds = float | Literal["network"] | None
"""Seconds of one region's inner step: a number, `network` (the median of the network's own), or
None = as the run's machine needed for one region. All tables and figures of a report use one."""
FAR_APART = 2.0  # step seconds of runs, as measured, that differ by more do not compare
PICTURE_STEPS = 60  # inner steps the timeline shows: more could not be told apart


@dataclasses.dataclass(frozen=True)
class Virtual:
    """Costs of a run on a network.

    Attributes:
      network: name of the network.
      step_seconds: seconds of one region's inner step.
      clock: wall-clock, utilisation, waits, bytes.
      allreduce_s: wall-clock of `network.BASELINE` for as many (nominal) steps, on the same clock.
      uneven: whether regions made different numbers of inner steps.
    """

    network: str
    step_seconds: float
    clock: ClockReport
    allreduce_s: float
    uneven: bool


def step_seconds_on(network: Network, step_seconds: float | None) -> StepSeconds:
    """Step seconds of a report: the given ones, else the network's compute_s, else as measured."""
    if step_seconds is not None:
        return step_seconds
    return "network" if network.compute_given else None


def check(runs: list[RunLog], name: str, step_seconds: float | None) -> Network:
    """The network, once it fits every run.

    Raises:
      RefusedError: lists everything that does not fit.
    """
    network, problems = problems_of(lambda: parse(name))
    if network is not None:
        problems = [
            f"{run.name} has {run.header['regions']} regions, network {name} has {network.size}: "
            f"name one of that size, e.g. aws:Oregon,Virginia,..., or give the file "
            f"{run.header['regions']} regions"
            for run in runs
            if run.header["regions"] != network.size
        ]
    problems += [f"{run.name} has made no step yet: leave it out" for run in runs if not run.steps]
    if step_seconds is not None and not 0 < step_seconds < math.inf:  # so that NaN is refused
        problems.append(
            f"--step_seconds={step_seconds}: must be positive and finite; give seconds above 0"
        )
    refuse_any(problems, "report")
    return network


def on_network(run: RunLog, network: Network, step_seconds: StepSeconds) -> Virtual:
    """Replay a run's events.

    Args:
      step_seconds: see `StepSeconds`.

    Raises:
      RefusedError: the run is too short to know its speed, and `step_seconds` is not given.
    """
    network = _stepping(run, network, step_seconds)
    clock = replay(network, run.steps, record_from=None)
    baseline, as_many = VirtualClock(network), round(nominal_steps(run, run.steps[-1]))
    every_step(baseline, 1, max(1, as_many), 4 * run.header["trained_params"])
    uneven = any("active" in row for row in run.steps)
    wall = float(baseline.now_R.max())
    seconds = float(np.median(network.compute_R))
    return Virtual(network.name, seconds, clock.report(), wall, uneven)


def step_seconds_apart(runs: Sequence[RunLog], step_seconds: StepSeconds) -> str | None:
    """A warning where runs are replayed with step seconds of their own that differ much, or None.

    Args:
      step_seconds: see `StepSeconds`.
    """
    if step_seconds is not None or len(runs) < 2:
        return None
    taken = {run.name: _own_step_seconds(run) for run in runs}
    slow, fast = max(taken, key=taken.__getitem__), min(taken, key=taken.__getitem__)
    if taken[slow] <= FAR_APART * taken[fast]:
        return None
    return (
        f"steps took {taken[slow]:.3g} s in {slow} and {taken[fast]:.3g} s in {fast} (a run of one "
        "log interval counts compilation): their utilisation and how much faster they are do not "
        "compare; give --step_seconds"
    )


def last_steps(run: RunLog, network: Network, step_seconds: StepSeconds) -> Timeline:
    """The timeline of the last `PICTURE_STEPS` steps; see `on_network`."""
    network = _stepping(run, network, step_seconds)
    shown_from = max(1, len(run.steps) - PICTURE_STEPS + 1)
    return replay(network, run.steps, record_from=shown_from).timeline()


def seconds_at(
    run: RunLog, network: Network, step_seconds: StepSeconds, steps: Sequence[int]
) -> list[float]:
    """Virtual seconds at which the last region is done with each of these steps, in order."""
    clock, done, seconds = VirtualClock(_stepping(run, network, step_seconds)), 0, []
    for step in steps:
        replay(clock.network, run.steps[done:step], record_from=None, clock=clock)
        done = step
        seconds.append(float(clock.now_R.max()))
    return seconds


def _stepping(run: RunLog, network: Network, step_seconds: StepSeconds) -> Network:
    """The network with these step seconds; of its own only the ratios count, unless asked for."""
    if step_seconds == "network":
        return network
    return network.with_median_step(step_seconds or _own_step_seconds(run))


def _own_step_seconds(run: RunLog) -> float:
    """Seconds of one region's step.

    Regions of one process run in turn, so that one has a share of the time. Those that are jobs run
    side by side; the speed of a merged log is the sum of theirs.
    """
    speed = summarise(run).tokens_per_second
    if speed is None:
        problem = f"{run.name} is too short to know its speed: give --step_seconds"
        raise RefusedError([problem], "report")
    at_once = len(run.header["here"]) if "present" in run.steps[0] else 1
    return run.header["tokens_per_step"] / run.header["regions"] * at_once / speed
