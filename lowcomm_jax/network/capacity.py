"""Refuse schedules whose bytes can never fit through the link."""

import math
from collections.abc import Sequence

from lowcomm_jax.network.collectives import step_seconds, sync_seconds
from lowcomm_jax.network.errors import raise_all
from lowcomm_jax.network.links import Network


def catch_up_violations(
    network: Network,
    route: str,
    nbytes: float,
    period: int,
    label: str = "schedule",
    members: Sequence[int] | None = None,
) -> list[str]:
    """Say whether the bytes of one period take longer on the link than the period computes.

    Args:
        network: links; a period computes `period * step_seconds`.
        route: one of `routes.ROUTES`.
        nbytes: payload bytes a region sends in one period, all fragments together.
        period: inner steps.
        label: named in the message.
        members: region ids; None = all.

    Returns:
        Nothing, or one sentence with the smallest changes that would work.
    """
    latency = sync_seconds(network, 0.0, route, members)
    volume = sync_seconds(network, nbytes, route, members) - latency
    room = period * step_seconds(network)
    if volume <= room:
        return []
    factor, gbps = volume / room, network.slowest_gbps
    return [
        f"{label}: the bytes of one period need {volume:.3g} s of link time but a period "
        f"computes only {room:.3g} s, "
        f"so fragments never catch up: raise the bandwidth x{factor:.3g} (slowest link "
        f"{gbps:.3g} -> "
        f"{gbps * factor:.3g} Gbit/s), or the period to {math.ceil(period * factor - 1e-9)}, or "
        f"compress x{factor:.3g} more"
    ]


def check_catch_up(
    network: Network, route: str, nbytes: float, period: int, label: str = "schedule"
) -> None:
    """Raise when a schedule can never catch up with its link.

    Raises:
        ValueError: see `catch_up_violations`.
    """
    raise_all(label, catch_up_violations(network, route, nbytes, period, label))
