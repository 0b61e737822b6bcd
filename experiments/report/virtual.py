"""Replay the events of a run on a network of your choice, in virtual time."""

from __future__ import annotations

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Links:
    """A network that runs are replayed on, at these seconds of a region's inner step."""

    network: Network
    step_seconds: StepSeconds

    @classmethod
    def paced(cls, network: Network, step_seconds: float | None) -> Links:
        """At the given step seconds, else the network's compute_s, else as each run measured."""
        own = "network" if network.compute_given else None
        return cls(network, own if step_seconds is None else step_seconds)

    def of(self, run: RunLog) -> Network:
        """The network at a run's step seconds; of its own only the ratios count, unless asked for.

        Raises:
          RefusedError: the run is too short to know its speed, and no step seconds are given.
        """
        if self.step_seconds == "network":
            return self.network
        return self.network.with_median_step(self.step_seconds or _own_step_seconds(run))

    def scaled(self, bandwidth: float) -> Links:
        """The same with links that are faster by this factor."""
        return dataclasses.replace(self, network=self.network.scaled(bandwidth=bandwidth))

    def paces_apart(self, runs: Sequence[RunLog]) -> str | None:
        """A warning where runs are replayed at step seconds of their own that differ much."""
        if self.step_seconds is not None or len(runs) < 2:
            return None
        taken = {run.name: _own_step_seconds(run) for run in runs}
        slow, fast = max(taken, key=taken.__getitem__), min(taken, key=taken.__getitem__)
        if taken[slow] <= FAR_APART * taken[fast]:
            return None
        return (
            f"steps took {taken[slow]:.3g} s in {slow} and {taken[fast]:.3g} s in {fast} (a run of "
            "one log interval counts compilation): their utilisation and how much faster they are "
            "do not compare; give --step_seconds"
        )


def check(runs: list[RunLog], name: str, step_seconds: float | None) -> Links:
    """The network, once it fits every run; see `Links.paced`.

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
    refuse_any(problems, "report")
    return Links.paced(network, step_seconds)


def on_network(run: RunLog, links: Links) -> Virtual:
    """Replay a run's events; raises what `Links.of` does."""
    network = links.of(run)
    clock = replay(network, run.steps, record_from=None)
    baseline, as_many = VirtualClock(network), round(nominal_steps(run, run.steps[-1]))
    every_step(baseline, 1, max(1, as_many), 4 * run.header["trained_params"])
    uneven = any("active" in row for row in run.steps)
    wall = float(baseline.now_R.max())
    seconds = float(np.median(network.compute_R))
    return Virtual(network.name, seconds, clock.report(), wall, uneven)


def last_steps(run: RunLog, links: Links) -> Timeline:
    """The timeline of the last `PICTURE_STEPS` steps; see `on_network`."""
    shown_from = max(1, len(run.steps) - PICTURE_STEPS + 1)
    return replay(links.of(run), run.steps, record_from=shown_from).timeline()


def seconds_at(run: RunLog, links: Links, steps: Sequence[int]) -> list[float]:
    """Virtual seconds at which the last region is done with each of these steps, in order."""
    clock, done, seconds = VirtualClock(links.of(run)), 0, []
    for step in steps:
        replay(clock.network, run.steps[done:step], record_from=None, clock=clock)
        done = step
        seconds.append(float(clock.now_R.max()))
    return seconds


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
