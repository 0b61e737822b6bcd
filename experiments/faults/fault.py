"""Faults by script: which fault hits which region when, in a simulation and in real jobs alike.

A script is a YAML list, or `random:SEED:COUNT` (`scripts.at_random`):

    - {step: 40, kind: kill, region: 1, steps: 30}       # dies; is started again 30 steps later
    - {step: 80, kind: kill, region: 2}                  # dies for good
    - {step: 90, kind: stop, region: 0, steps: 10}       # stands still (SIGSTOP)
    - {step: 110, kind: partition, region: 0, steps: 9}  # does not reach the rendezvous
    - {step: 120, kind: outage, seconds: 5}              # nobody does
    - {step: 140, kind: corrupt, region: 1, steps: 20}   # of what it sends, a bit is flipped
    - {step: 170, kind: late, region: 2, steps: 20, delay: 3}  # sends everything 3 s later
    - {step: 200, kind: slow, region: 3, steps: 20, mbit: 2}   # its link carries 2 Mbit/s
    - {step: 230, kind: straggle, region: 0, steps: 20, delay: 0.1}  # its steps take 0.1 s longer
    - {step: 260, kind: replay, region: 1, steps: 20}    # it sends older payloads again
    - {step: 290, kind: nan, region: 2}                  # its parameters are not finite any more
    - {step: 310, kind: full_disk, region: 3, steps: 30}  # cannot write what it saw land, and ends
    - {step: 350, kind: stranger, region: 0, steps: 20}  # senseless bytes at its port, in the store
    - {step: 380, kind: version, region: 1, steps: 20}   # records of another version in its place
    - {step: 410, kind: seed, region: 2, steps: 20}      # a job with another seed in its place

or the same with `time` in the place of `step` and `seconds` in that of `steps`, in all entries.
- Steps are those of the furthest region. For `corrupt`, `replay`, `late` and `slow` the step of the
  send counts; for `straggle` and `nan` the region's own step.
- Times are seconds since all regions first met (`origin`), restarts and pauses included. In a
  simulation they are seconds of the network's virtual clock.

`launch --faults=` injects the faults into real jobs (`injector`). A fault that kills, stops or cuts
off a region begins only once that region and another one are in the run.

In a simulation (`train --config.faults=`) a region that is killed, stopped or cut off, has a full
disk, or sends damaged or older payloads, takes no part in exchanges meanwhile. After a kill or a
full disk the region starts from the anchor (`rejoin_regions` in `lowcomm_jax.recovery.rejoin`).
`nan` does the same as in jobs. The other kinds change nothing there.

Real jobs need a while to notice a loss, to restart and to catch up, and they defer what they cannot
send in an outage. A simulation repeats exactly what they did when it is given their happened.yaml
(`happened`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

ENDS = ("kill", "full_disk")
"""Kinds whose region's job ends; it starts from the anchor when they are over."""
ABSENT = (*ENDS, "stop", "partition", "corrupt", "replay")
"""Kinds whose region takes no part in exchanges meanwhile."""
INSIDE = ("corrupt", "replay", "late", "slow", "straggle", "nan")
"""Kinds that a region's job injects into itself (`fault_hooks`, `not_finite`)."""
BESIDE = ("stranger", "version", "seed")
"""Kinds that are done beside a region, which must not notice (`strangers`)."""
KINDS = (*ABSENT, "late", "slow", "straggle", "nan", *BESIDE, "outage")
FIELDS = ("step", "time", "kind", "region", "steps", "seconds", "delay", "mbit")


class Moment(NamedTuple):
    """Inner steps done, and seconds since the run began; None = it has not yet, or has no clock."""

    step: int
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault; with `time` in the place of `step`, and `seconds` of `steps`, it goes by time.

    Attributes:
      step: the fault begins when the furthest region has made this number of inner steps.
      kind: one of `KINDS`.
      region: that it hits; None for an outage.
      steps: length in steps; a kill without it is for good.
      seconds: length in seconds, of an outage or of a fault that goes by time.
      delay: seconds that payloads are late, or that a step takes longer.
      mbit: megabits a second of a slow link.
      time: the fault begins this number of seconds after the run began.
    """

    step: int | None
    kind: str
    region: int | None = None
    steps: int | None = None
    seconds: float | None = None
    delay: float = 0.0
    mbit: float = 0.0
    time: float | None = None

    @property
    def timed(self) -> bool:
        """Whether it goes by time."""
        return self.step is None

    @property
    def begin(self) -> float:
        """Step or time."""
        return self.time if self.timed else self.step

    @property
    def length(self) -> float:
        """Steps or seconds; 0 for an outage that begins at a step, whose end is not at a step, and
        for `nan`, which happens once."""
        if self.kind == "nan" or (self.kind == "outage" and not self.timed):
            return 0
        length = self.seconds if self.timed else self.steps
        return math.inf if length is None else length

    @property
    def end(self) -> float:
        """Step or time; infinity where a region does not come back."""
        return self.begin + self.length

    def at(self, moment: Moment) -> float:
        """Step or seconds of a moment, whichever this goes by; minus infinity before the run."""
        if not self.timed:
            return moment.step
        return -math.inf if moment.seconds is None else moment.seconds

    def on(self, step: int, seconds: float | None) -> bool:
        """Whether the fault is active at a step, or `seconds` after the run began."""
        return self.begin <= self.at(Moment(step, seconds)) < self.end

    def entry(self) -> dict[str, Any]:
        """As in a script."""
        given = {name: getattr(self, name) for name in FIELDS}
        # Nothing is of no length, so that 0 stands for what was not given, too.
        return {name: x for name, x in given.items() if x is not None and (x or name == "region")}


def participants(faults: Sequence[Fault], regions: int) -> Callable[..., np.ndarray]:
    """(inner step, seconds) -> bool `[R]`: who takes part in what is sent then.

    A region whose job ended takes part again only after the sends of the step of its return.
    """

    def up(step: int, seconds: float | None = None) -> np.ndarray:
        mask = np.ones(regions, bool)
        for fault in faults:
            returns = fault.kind in ENDS and not fault.timed and step == fault.end
            if fault.kind in ABSENT and (returns or fault.on(step, seconds)):
                mask[fault.region] = False
        return mask

    return up
