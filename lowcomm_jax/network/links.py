"""The network between regions: per-pair links, per-region limits, compute speed."""

import functools
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np

from lowcomm_jax.network.randomness import Jitter
from lowcomm_jax.refused import is_unknown, refuse

BYTES_PER_GBIT = 1e9 / 8.0


@dataclass(frozen=True)
class Entry:
    """What a description says of a field of `Network`, and which values it takes.

    Attributes:
        key: its name in a description.
        per: what has a number of its own.
        fits: whether values may be used, elementwise.
        fix: what to do else.
        null: the field's value where a description leaves it out; None = a number is needed.
        parts: how many of the description's units make one of the field's.
    """

    key: str
    per: Literal["pair", "region", "network"]
    fits: Callable[[np.ndarray], np.ndarray]
    fix: str
    null: float | None = 0.0
    parts: float = 1.0


_ABOVE_0 = (lambda x: (x > 0) & np.isfinite(x)), "use a finite number above 0"
_LIMIT = (lambda x: x > 0), "use more than 0, or null for no limit", np.inf
_NOT_NEGATIVE = (lambda x: (x >= 0) & np.isfinite(x)), "use 0 or more"
_SHARE = (lambda x: (x >= 0) & (x < 1)), "use at least 0 and below 1"


@dataclass(frozen=True, eq=False)
class Network:
    """Regions and the directed links between them.

    Matrices are float64 [R, R], row = sender, column = receiver; the diagonal is ignored.

    Attributes:
        name: short label.
        regions: one name a region; the position is the region id.
        bandwidth_RxR: Gbit/s of each directed link before loss.
        delay_RxR: one-way delay in seconds.
        loss_RxR: share of the bandwidth that is lost, in [0, 1): goodput = bandwidth * (1 - loss).
        egress_R, ingress_R: Gbit/s shared by all links that leave / enter a region; inf = no limit.
        compute_R: median seconds of one inner step in each region.
        compute_given: whether a description gave them; else they are 1 s everywhere, which nobody
            has measured.
        compute_jitter: factor on the compute seconds, drawn per (step, region).
        transfer_jitter: factor on a transfer's duration, drawn per (transfer, link).
        sync_constant_s: seconds added to every transfer (host copies, quorum, per-tensor
            overheads).
        first_use_s: seconds added once to the first transfer over a link (connection set-up).
        source: where the numbers come from.
        confidence: how far the source may be trusted: "measured", "published", "assumed".
    """

    name: str
    regions: tuple[str, ...]
    bandwidth_RxR: Annotated[np.ndarray, Entry("bandwidth_gbps", "pair", *_ABOVE_0, null=None)]
    delay_RxR: Annotated[np.ndarray, Entry("delay_ms", "pair", *_NOT_NEGATIVE, parts=1e3)]
    loss_RxR: Annotated[np.ndarray, Entry("loss", "pair", *_SHARE)]
    egress_R: Annotated[np.ndarray, Entry("egress_gbps", "region", *_LIMIT)]
    ingress_R: Annotated[np.ndarray, Entry("ingress_gbps", "region", *_LIMIT)]
    compute_R: Annotated[np.ndarray, Entry("compute_s", "region", *_ABOVE_0, null=None)]
    compute_jitter: Jitter = field(default_factory=Jitter)
    transfer_jitter: Jitter = field(default_factory=Jitter)
    sync_constant_s: Annotated[float, Entry("sync_constant_s", "network", *_NOT_NEGATIVE)] = 0.0
    first_use_s: Annotated[float, Entry("first_use_s", "network", *_NOT_NEGATIVE)] = 0.0
    source: str = "given by the user"
    confidence: str = "assumed"
    compute_given: bool = False

    @property
    def size(self) -> int:
        """Count the regions."""
        return len(self.regions)

    @functools.cached_property
    def rate_RxR(self) -> np.ndarray:
        """Give the goodput of each directed link in bytes per second."""
        return self.bandwidth_RxR * (1.0 - self.loss_RxR) * BYTES_PER_GBIT

    @functools.cached_property
    def egress_rate_R(self) -> np.ndarray:
        """Give each region's shared sending limit in bytes per second."""
        return self.egress_R * BYTES_PER_GBIT

    @functools.cached_property
    def ingress_rate_R(self) -> np.ndarray:
        """Give each region's shared receiving limit in bytes per second."""
        return self.ingress_R * BYTES_PER_GBIT

    @property
    def slowest_gbps(self) -> float:
        """Give the goodput in Gbit/s of the slowest directed link."""
        rates_RxR = self.rate_RxR / BYTES_PER_GBIT
        off = ~np.eye(self.size, dtype=bool)
        return float(rates_RxR[off].min()) if self.size > 1 else float("inf")

    def scaled(self, bandwidth: float = 1.0, delay: float = 1.0, compute: float = 1.0) -> "Network":
        """Copy with bandwidths (links, egress, ingress), delays and compute seconds multiplied."""
        return replace(
            self,
            bandwidth_RxR=self.bandwidth_RxR * bandwidth,
            egress_R=self.egress_R * bandwidth,
            ingress_R=self.ingress_R * bandwidth,
            delay_RxR=self.delay_RxR * delay,
            compute_R=self.compute_R * compute,
        )

    def with_compute(self, seconds: float | Sequence[float]) -> "Network":
        """Copy with other compute seconds per step (one number or one per region).

        Raises:
            ValueError: a value is not positive.
        """
        compute_R = np.broadcast_to(np.asarray(seconds, np.float64), (self.size,)).copy()
        if not (compute_R > 0).all():
            raise ValueError(f"compute seconds {compute_R.tolist()} must all be above 0")
        return replace(self, compute_R=compute_R)

    def with_median_step(self, seconds: float) -> "Network":
        """Copy in which the median region's inner step takes `seconds`; how much slower one region
        is than another stays.

        Raises:
            ValueError: `seconds` is not positive.
        """
        return self.with_compute(seconds * self.compute_R / np.median(self.compute_R))

    def subset(self, names: Sequence[str]) -> "Network":
        """Copy with only the named regions, in the given order.

        Raises:
            ValueError: a name is unknown or repeated.
        """
        known = set(self.regions)
        bad = [] if len(names) else ["no region is named: use some of " + ", ".join(self.regions)]
        bad += [f"region {n!r} {is_unknown(n, self.regions)}" for n in names if n not in known]
        bad += [
            f"region {n!r} is named twice"
            for n in sorted({n for n in names if list(names).count(n) > 1})
        ]
        refuse(f"subset of network {self.name!r}", bad)
        index = [self.regions.index(n) for n in names]
        kept = {"pair": np.ix_(index, index), "region": index, "network": ()}
        picked = {name: getattr(self, name)[kept[e.per]] for name, e in ENTRIES if kept[e.per]}
        return replace(self, regions=tuple(names), **picked)


ENTRIES: tuple[tuple[str, Entry], ...] = tuple(
    (name, hint.__metadata__[0])
    for name, hint in typing.get_type_hints(Network, include_extras=True).items()
    if hasattr(hint, "__metadata__")
)
"""The fields of a `Network` that are numbers."""


def uniform(
    regions: int | Sequence[str],
    bandwidth_gbps: float,
    delay_s: float = 0.0,
    compute_s: float = 1.0,
    shared: bool = False,
    **fields: Any,
) -> Network:
    """Build a network with equal links.

    Args:
        regions: how many regions (named r0, r1, ...) or their names.
        bandwidth_gbps: Gbit/s of every directed link.
        delay_s: one-way delay of every link in seconds.
        compute_s: seconds of one inner step in every region.
        shared: when True the bandwidth is also each region's whole egress and ingress.
        **fields: any other field of `Network`.

    Raises:
        ValueError: a number is out of range.
    """
    names = tuple(f"r{i}" for i in range(regions)) if isinstance(regions, int) else tuple(regions)
    count = len(names)
    limit = bandwidth_gbps if shared else np.inf
    network = Network(
        name=fields.pop("name", "uniform"),
        regions=names,
        bandwidth_RxR=np.full((count, count), float(bandwidth_gbps)),
        delay_RxR=np.full((count, count), float(delay_s)),
        loss_RxR=np.zeros((count, count)),
        egress_R=np.full(count, float(limit)),
        ingress_R=np.full(count, float(limit)),
        compute_R=np.full(count, float(compute_s)),
        **fields,
    )
    refuse(f"network {network.name!r}", violations(network))
    return network


def violations(network: Network) -> list[str]:
    """List everything wrong with a network, each with the smallest change that would work."""
    found = _shape_violations(network)
    if found:
        return found
    others_RxR = ~np.eye(network.size, dtype=bool)
    joined_RxR = (network.bandwidth_RxR > 0) & np.isfinite(network.bandwidth_RxR) & others_RxR
    parts = components(joined_RxR & joined_RxR.T)
    if len(parts) > 1:
        named = [", ".join(network.regions[i] for i in part) for part in parts]
        shown = " | ".join(f"{{{part}}}" for part in named)
        found.append(
            f"the network falls into {len(parts)} parts {shown}: give every pair across them a "
            "bandwidth above 0, or leave regions out so that one part remains"
        )
    for name, entry in ENTRIES:
        values = np.asarray(getattr(network, name), float)
        wrong = ~entry.fits(values) & (others_RxR if entry.per == "pair" else True)
        found += [
            f"{entry.key}{_of(network.regions, at)} is {values[tuple(at)] * entry.parts:g}: "
            f"{entry.fix}"
            for at in np.argwhere(wrong)
        ]
    found += network.compute_jitter.violations("compute_jitter")
    found += network.transfer_jitter.violations("transfer_jitter")
    return found


def _of(regions: Sequence[str], at: Sequence[int]) -> str:
    """The pair, the region or nothing, as a message names it."""
    if len(at) == 2:
        return f" {regions[at[0]]} -> {regions[at[1]]}"
    return f" of region {regions[at[0]]!r}" if len(at) else ""


def _shape_violations(network: Network) -> list[str]:
    count = network.size
    found = [] if count else ["regions is empty: name at least one region"]
    repeated = sorted({n for n in network.regions if network.regions.count(n) > 1})
    found += [f"region name {n!r} is used twice: give each region its own name" for n in repeated]
    needed = {"pair": (count, count), "region": (count,), "network": ()}
    for name, entry in ENTRIES:
        shape, right = np.shape(getattr(network, name)), needed[entry.per]
        if shape != right:
            found.append(f"{name} has shape {shape}: with {count} regions it must be {right}")
    return found


def components(linked_RxR: np.ndarray) -> list[list[int]]:
    """Split region ids into connected parts of a symmetric boolean matrix."""
    unseen_R = np.ones(len(linked_RxR), bool)
    parts = []
    while unseen_R.any():
        part_R = np.zeros(len(linked_RxR), bool)
        frontier_R = part_R.copy()
        frontier_R[np.argmax(unseen_R)] = True
        while frontier_R.any():
            part_R |= frontier_R
            frontier_R = linked_RxR[frontier_R].any(axis=0) & ~part_R
        unseen_R &= ~part_R
        parts.append(np.flatnonzero(part_R).tolist())
    return parts
