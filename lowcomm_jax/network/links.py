"""The network between regions: per-pair links, per-region limits, compute speed."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lowcomm_jax.network.randomness import Jitter
from lowcomm_jax.refused import is_unknown, refuse

BYTES_PER_GBIT = 1e9 / 8.0


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
        control_bytes: bytes each participant exchanges with each other member per transfer
            (headers, commit records); booked apart from payload, cost no time.
        control_rate: bytes per second and region of background control traffic (heartbeats).
        source: where the numbers come from.
        confidence: how far the source may be trusted: "measured", "published", "assumed".
    """

    name: str
    regions: tuple[str, ...]
    bandwidth_RxR: np.ndarray
    delay_RxR: np.ndarray
    loss_RxR: np.ndarray
    egress_R: np.ndarray
    ingress_R: np.ndarray
    compute_R: np.ndarray
    compute_jitter: Jitter = field(default_factory=Jitter)
    transfer_jitter: Jitter = field(default_factory=Jitter)
    sync_constant_s: float = 0.0
    first_use_s: float = 0.0
    control_bytes: int = 0
    control_rate: float = 0.0
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
        pick = np.ix_(index, index)
        return replace(
            self,
            regions=tuple(names),
            bandwidth_RxR=self.bandwidth_RxR[pick],
            delay_RxR=self.delay_RxR[pick],
            loss_RxR=self.loss_RxR[pick],
            egress_R=self.egress_R[index],
            ingress_R=self.ingress_R[index],
            compute_R=self.compute_R[index],
        )


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
    off_RxR = ~np.eye(network.size, dtype=bool)
    found += _pair_violations(network, off_RxR)
    for label, values_R in (("egress_gbps", network.egress_R), ("ingress_gbps", network.ingress_R)):
        found += [
            f"{label} of region {network.regions[i]!r} is {values_R[i]:g}: use more than 0, or "
            "null for no limit"
            for i in np.flatnonzero(~(values_R > 0))
        ]
    found += [
        f"compute_s of region {network.regions[i]!r} is {network.compute_R[i]:g}: use more than 0"
        for i in np.flatnonzero(~((network.compute_R > 0) & np.isfinite(network.compute_R)))
    ]
    for label in ("sync_constant_s", "first_use_s", "control_bytes", "control_rate"):
        value = getattr(network, label)
        if not (np.isfinite(value) and value >= 0):
            found.append(f"{label} is {value}: use 0 or more")
    found += network.compute_jitter.violations("compute_jitter")
    found += network.transfer_jitter.violations("transfer_jitter")
    return found


def _shape_violations(network: Network) -> list[str]:
    found = []
    count = network.size
    if count < 1:
        found.append("regions is empty: name at least one region")
    repeated = sorted({n for n in network.regions if network.regions.count(n) > 1})
    found += [f"region name {n!r} is used twice: give each region its own name" for n in repeated]
    for label in ("bandwidth_RxR", "delay_RxR", "loss_RxR"):
        shape = getattr(network, label).shape
        if shape != (count, count):
            found.append(
                f"{label} has shape {shape}: with {count} regions it must be ({count}, {count})"
            )
    for label in ("egress_R", "ingress_R", "compute_R"):
        shape = getattr(network, label).shape
        if shape != (count,):
            found.append(f"{label} has shape {shape}: with {count} regions it must be ({count},)")
    return found


def _pair_violations(network: Network, off_RxR: np.ndarray) -> list[str]:
    """Pairs without a usable link, and delays and losses out of range, one line each."""
    names = network.regions
    found = []
    usable_RxR = (network.bandwidth_RxR > 0) & np.isfinite(network.bandwidth_RxR)
    parts = components(usable_RxR & usable_RxR.T & off_RxR)
    if len(parts) > 1:
        shown = " | ".join("{" + ", ".join(names[i] for i in part) + "}" for part in parts)
        found.append(
            f"the network falls into {len(parts)} parts {shown}: give every pair across them a "
            "bandwidth above 0, "
            f"or leave regions out so that one part remains"
        )
    for i, j in np.argwhere(~usable_RxR & off_RxR):
        found.append(
            f"bandwidth {names[i]} -> {names[j]} is {network.bandwidth_RxR[i, j]:g} Gbit/s: use "
            "a finite number above 0"
        )
    for i, j in np.argwhere(~((network.delay_RxR >= 0) & np.isfinite(network.delay_RxR)) & off_RxR):
        found.append(
            f"delay {names[i]} -> {names[j]} is {network.delay_RxR[i, j]:g} s: use 0 or more"
        )
    for i, j in np.argwhere(~((network.loss_RxR >= 0) & (network.loss_RxR < 1)) & off_RxR):
        found.append(
            f"loss {names[i]} -> {names[j]} is {network.loss_RxR[i, j]:g}: use at least 0 and "
            "below 1"
        )
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
