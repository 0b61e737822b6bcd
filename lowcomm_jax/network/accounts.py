"""Costs of a run (`summarise` gives a `ClockReport`) and of one collective alone (`usage_of`)."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from lowcomm_jax.network.collectives import Profile
from lowcomm_jax.network.ledger import Ledger
from lowcomm_jax.network.links import BYTES_PER_GBIT, Network


@dataclass(frozen=True, eq=False)
class ClockReport:
    """Costs of a run so far. Seconds are virtual; arrays are float64 [R].

    Attributes:
        wall_s: time of the last region.
        compute_R, peers_R, exposed_R, absent_R: seconds computing, waiting for slower peers,
            waiting for bytes, and away; the rest of wall_s a region waits for the last one to end.
        utilisation_R, utilisation: compute / wall per region, and their mean.
        sent_R, received_R, control_R: payload and control bytes.
        mean_gbps_R, peak_gbps_R: sending rate over the wall-clock, and the largest at any moment.
    """

    wall_s: float
    compute_R: np.ndarray
    peers_R: np.ndarray
    exposed_R: np.ndarray
    absent_R: np.ndarray
    utilisation_R: np.ndarray
    utilisation: float
    sent_R: np.ndarray
    received_R: np.ndarray
    control_R: np.ndarray
    mean_gbps_R: np.ndarray
    peak_gbps_R: np.ndarray

    def as_dict(self) -> dict[str, Any]:
        """Give plain numbers and lists for JSON."""
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in vars(self).items()}


def summarise(
    network: Network,
    ledger: Ledger,
    now_R: np.ndarray,
    waits_3xR: tuple[np.ndarray, np.ndarray, np.ndarray],
    peak_R: np.ndarray,
) -> ClockReport:
    """Sum up a run from the regions' times, their waits (peers, bytes, absent) and peak rates."""
    wall = float(now_R.max())
    peers_R, exposed_R, absent_R = (wait_R.copy() for wait_R in waits_3xR)
    compute_R = now_R - peers_R - exposed_R - absent_R
    utilisation_R = compute_R / wall if wall > 0 else np.ones(network.size)
    sent_R = ledger.sent_R()
    mean_gbps_R = sent_R / wall / BYTES_PER_GBIT if wall > 0 else np.zeros(network.size)
    return ClockReport(
        wall_s=wall,
        compute_R=compute_R,
        peers_R=peers_R,
        exposed_R=exposed_R,
        absent_R=absent_R,
        utilisation_R=utilisation_R,
        utilisation=float(utilisation_R.mean()),
        sent_R=sent_R,
        received_R=ledger.received_R(),
        control_R=ledger.control_R + wall * network.control_rate,
        mean_gbps_R=mean_gbps_R,
        peak_gbps_R=peak_R / BYTES_PER_GBIT,
    )


def usage_of(network: Network, shape: Profile) -> tuple[dict, np.ndarray]:
    """Give the links that a collective uses while alone.

    Returns:
        The share of every link and of every limited egress and ingress, and each member's bytes per
        second.
    """
    volume = shape.volume_s
    out_R, in_R = np.zeros(network.size), np.zeros(network.size)
    if volume <= 0:
        return {}, np.zeros(len(shape.members))
    np.add.at(out_R, shape.sources, shape.bytes_L / volume)
    np.add.at(in_R, shape.targets, shape.bytes_L / volume)
    usage = {}
    for source, target, nbytes in zip(
        shape.sources.tolist(), shape.targets.tolist(), shape.bytes_L, strict=True
    ):
        usage["link", source, target] = min(
            1.0, float(nbytes / volume / network.rate_RxR[source, target])
        )
    for label, rate_R, limit_R in (
        ("out", out_R, network.egress_rate_R),
        ("in", in_R, network.ingress_rate_R),
    ):
        for region in shape.members:
            if np.isfinite(limit_R[region]):
                usage[label, region, 0] = min(1.0, float(rate_R[region] / limit_R[region]))
    return usage, out_R[list(shape.members)]
