"""What a link can carry: schedules that never catch up, and the overlap that hides a transfer."""

import math

from lowcomm_jax.network.collectives import step_seconds
from lowcomm_jax.network.links import Network


def catch_up_violations(network: Network, volume_s: float, period: int, label: str) -> list[str]:
    """Say whether the bytes of one period take longer on the link than the period computes.

    Args:
        network: a period computes `period * step_seconds`.
        volume_s: link seconds of all bytes of one period, latency left out.
        period: inner steps.
        label: named in the message.

    Returns:
        Nothing, or one sentence with the smallest changes that would work.
    """
    room = period * step_seconds(network)
    if volume_s <= room:
        return []
    factor, gbps = volume_s / room, network.slowest_gbps
    return [
        f"{label}: the bytes of one period need {volume_s:.3g} s of link time but a period "
        f"computes only {room:.3g} s, so fragments never catch up: raise the bandwidth "
        f"x{factor:.3g} (slowest link {gbps:.3g} -> {gbps * factor:.3g} Gbit/s), or the period to "
        f"{math.ceil(period * factor - 1e-9)}, or compress x{factor:.3g} more"
    ]


def derive_tau(transfer_s: float, compute_s: float, margin: int = 0) -> int:
    """Give the overlap in inner steps that hides a transfer: ceil(T_s / T_c) + margin.

    Raises:
        ValueError: `compute_s` is not positive.
    """
    if compute_s <= 0:
        raise ValueError(f"compute seconds {compute_s} must be above 0")
    return math.ceil(transfer_s / compute_s - 1e-9) + margin
