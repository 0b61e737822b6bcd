"""Goodput under failures: the share of allocated chip time that does useful work.

`Fleet` holds chips and failure rates; `goodput_simulation.plan_goodput` gives a `Goodput` for each
of `METHODS`.

A job is the set of chips that stops together: all regions under data parallelism, one region else.
An interrupt is a failed chip (its slice drops out until it is repaired), or a whole region that is
away. The methods differ in how a stopped region affects the others (`Reaction`).

Source: the goodput simulation of Decoupled DiLoCo (arXiv 2604.21428), read second-hand in two notes
that agree; `evidence/published` has its table beside ours. `FITTED` has two values for its elastic
and decoupled columns and two for data parallelism; both pairs are fitted to that table, and are in
no source. Goodput there, as here, counts failures alone: the time of links is in the plan's
utilisation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from lowcomm_jax.refused import above_zero, not_negative, whole
from lowcomm_jax.settings import described

YEAR_S = 365 * 86400.0
DP, ELASTIC_DP, DECOUPLED = "dp", "elastic_dp", "decoupled"


class Reaction:
    """How a stopped region affects the others.

    ONE_JOB: there is one job over all regions: everything stops.
    WAIT: the others train until they need its payload, then wait. None of its work is lost.
    ABSENT: the others do not wait. Work that it had not sent is lost; it takes the others' state
        and starts with them after the next synchronisation. The runtime of this project does so, 4
        s after the last heartbeat (docs/regions.md). Those 4 s are not counted.
    INDEPENDENT: the others do not wait, and it starts as soon as it has a peer's state.
    """

    ONE_JOB, WAIT, ABSENT, INDEPENDENT = "one job", "wait", "absent", "independent"


class MethodUnderFailures(NamedTuple):
    """How a method takes a failure.

    Attributes:
        title: for tables.
        reaction: one of `Reaction`.
        elastic: its job goes on with fewer chips; else it stands until all chips are there. Of
            methods with a job a region, `Fleet.elastic_regions` says so.
        streaming: it sends `Fleet.fragments` apart and overlaps `Fleet.overlap_s`; else all
            parameters leave at once, and land at once.
    """

    title: str
    reaction: str
    elastic: bool = True
    streaming: bool = False


METHODS = {
    DP: MethodUnderFailures("DP", Reaction.ONE_JOB, elastic=False),
    ELASTIC_DP: MethodUnderFailures("elastic DP", Reaction.ONE_JOB),
    "diloco_wait": MethodUnderFailures("DiLoCo, waits", Reaction.WAIT),
    "diloco_absent": MethodUnderFailures("DiLoCo, absent", Reaction.ABSENT),
    "streaming_wait": MethodUnderFailures("Streaming, waits", Reaction.WAIT, streaming=True),
    "streaming_absent": MethodUnderFailures("Streaming, absent", Reaction.ABSENT, streaming=True),
    DECOUPLED: MethodUnderFailures("Decoupled", Reaction.INDEPENDENT),
}


class Fitted(NamedTuple):
    """Two values fitted to published columns: (1 - overhead) / (1 + stop_s / T).

    Attributes:
        overhead: c, the share that is lost whatever fails.
        stop_s: d, the seconds that an interrupt costs a job.
    """

    overhead: float
    stop_s: float


FITTED = {"elastic": Fitted(0.0305, 19.7), "dp": Fitted(0.0935, 64.6)}


@described
@dataclass(frozen=True)
class Fleet:
    """The chips of a run, and their failures. Times in seconds."""

    regions: Annotated[tuple[int, ...], "chips that train in each region"]
    chip_mtbf_s: Annotated[
        float | tuple[float, ...],
        "mean time between interrupts of one chip; one for all regions, or one each",
    ] = YEAR_S
    stop_s: Annotated[
        float,
        "Seconds that an elastic job loses by an interrupt, and by taking chips back: it stops. "
        "What it computes again since its last checkpoint is included.",
    ] = FITTED["elastic"].stop_s
    restart_s: Annotated[
        float,
        "Seconds that a job loses by an interrupt, once all its chips are there, where it is not "
        "elastic: DP, and each region's job without `elastic_regions`. What it computes again "
        "since its last checkpoint is included.",
    ] = FITTED["dp"].stop_s
    repair_s: Annotated[float, "how long until a failed chip's slice is back"] = 0.0
    slice_chips: Annotated[int, "chips that drop out together"] = 1
    spare_slices: Annotated[
        int,
        "In every region, allocated and idle; they take a failed slice's place. One job over all "
        "regions shares them.",
    ] = 0
    outage_mtbf_s: Annotated[
        float | None, "mean time between outages of a whole region; None = there are none"
    ] = None
    outage_s: Annotated[float, "how long a region is away"] = 0.0
    overhead: Annotated[float, "share of time that elastic jobs lose without any failure"] = 0.0
    restart_overhead: Annotated[float, "share of time that other jobs lose without any failure"] = (
        0.0
    )
    elastic_regions: Annotated[
        bool,
        "Whether a region's job goes on with fewer chips; else it waits until all are there and "
        "restarts, as DP does.",
    ] = True
    period_s: Annotated[
        float, "seconds of training between two synchronisations of the same parameters"
    ] = 100.0
    fragments: Annotated[int, "of Streaming: parts that it sends apart"] = 8
    overlap_s: Annotated[float, "of Streaming: seconds from a send to its landing"] = 1.0
    decoupled_period_s: Annotated[
        float,
        "the same as `period_s` for Decoupled, which sends a fragment every step; 0 = work that a "
        "learner had not sent is counted in `stop_s`",
    ] = 0.0

    @property
    def chips(self) -> int:
        """Count the chips that train while nothing is broken."""
        return sum(self.regions)

    @property
    def allocated(self) -> int:
        """Count all chips, spare ones included."""
        return self.chips + self.spare_slices * self.slice_chips * len(self.regions)

    @property
    def rates(self) -> tuple[float, ...]:
        """Give the interrupts a second of each region while all its chips train."""
        return tuple(n / mtbf for n, mtbf in zip(self.regions, self.mtbfs, strict=True))

    @property
    def mtbfs(self) -> tuple[float, ...]:
        """Give the mean time between interrupts of a chip, for each region."""
        given = self.chip_mtbf_s
        return given if isinstance(given, tuple) else (given,) * len(self.regions)

    def overhead_of(self, method: str) -> float:
        """Give the share of time that a method loses without any failure."""
        return self.overhead if self.elastic(method) else self.restart_overhead

    def stop_of(self, method: str) -> float:
        """Give the seconds that a job of a method loses by an interrupt."""
        return self.stop_s if self.elastic(method) else self.restart_s

    def elastic(self, method: str) -> bool:
        """Say whether a method's jobs go on with fewer chips."""
        how = METHODS[method]
        one_job = how.reaction == Reaction.ONE_JOB
        return how.elastic if one_job else self.elastic_regions

    def violations(self) -> list[str]:
        """List the settings that cannot be simulated, each with its fix."""
        if not self.regions:
            return ["regions is empty: give the chips of each, such as (512, 512, 512)"]
        found = [line for n in self.regions for line in whole("chips of a region", n)]
        if isinstance(self.chip_mtbf_s, tuple) and len(self.chip_mtbf_s) != len(self.regions):
            count, given = len(self.regions), len(self.chip_mtbf_s)
            found.append(
                f"chip_mtbf_s has {given} values for {count} regions: give one, or {count}"
            )
        else:
            found += [line for mtbf in self.mtbfs for line in above_zero("chip_mtbf_s", mtbf)]
        for name in ("stop_s", "restart_s", "repair_s", "outage_s", "overlap_s"):
            found += not_negative(name, getattr(self, name))
        found += not_negative("decoupled_period_s", self.decoupled_period_s)
        for name in ("overhead", "restart_overhead"):
            value = getattr(self, name)
            problem = not_negative(name, value)
            found += problem or ([] if value < 1 else [f"{name} is {value}: use less than 1"])
        found += whole("slice_chips", self.slice_chips) + whole("fragments", self.fragments)
        found += whole("spare_slices", self.spare_slices, 0)
        found += above_zero("period_s", self.period_s)
        if not isinstance(self.elastic_regions, bool):
            found.append(f"elastic_regions is {self.elastic_regions!r}: use True or False")
        if self.outage_mtbf_s is not None:
            found += above_zero("outage_mtbf_s", self.outage_mtbf_s)
        if found:
            return found
        if self.slice_chips > min(self.regions):
            most = min(self.regions)
            found.append(f"slice_chips is {self.slice_chips}: use at most {most}, a whole region")
        between = self.period_s / self.fragments
        if self.overlap_s > between:
            found.append(
                f"overlap_s is {self.overlap_s:g}: use at most {between:g}, the seconds between "
                "two sends (period_s / fragments)"
            )
        return found


@dataclass(frozen=True)
class Goodput:
    """How the allocated chip time of one method is used. Shares in [0, 1].

    Attributes:
        method: of `METHODS`.
        goodput: share that does useful work.
        uptime: share of time at least one region advances.
        lost: {cause: share}; with `goodput` they sum to 1.
        error: standard error of `goodput`.
    """

    method: str
    goodput: float
    uptime: float
    lost: Mapping[str, float] = field(default_factory=dict)
    error: float = 0.0


def closed_form(mtbf_s: float, stop_s: float, overhead: float) -> float:
    """Give (1 - overhead) / (1 + stop_s / mtbf_s), the goodput of a job on its own.

    The job trains for `mtbf_s` on average and then stands for `stop_s`; interrupts while it stands
    change nothing.
    """
    return (1.0 - overhead) / (1.0 + stop_s / mtbf_s)
