"""Finds the best H, K, tau and codec for a link under a bound on the loss penalty."""

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lowcomm_jax.planner.dag import utilisation
from lowcomm_jax.planner.methods import DILOCO, PlanMethod
from lowcomm_jax.planner.plan import Workload, dag_schedule, exchange_seconds, never_catches_up
from lowcomm_jax.refused import not_negative, refuse

PERIODS = (10, 30, 50, 100, 200, 500)
FRAGMENTS = (1, 4, 16)
TAUS = (0, 1, 5, 10)
SEARCHED_CODECS = ("fp32", "bf16", "int8", "int4")
# Utilisations this close count as equal: the smaller penalty, then fewer bytes, decides.
NEAR = 0.005


@dataclass(frozen=True)
class Choice:
    """One setting found by the search.

    Attributes:
        method: the setting.
        utilisation: on the given network.
        penalty_nats: published loss penalty beside H = 30.
        bytes_per_step: bytes of a region's payloads per inner step.
    """

    method: PlanMethod
    utilisation: float
    penalty_nats: float
    bytes_per_step: float


def search(
    work: Workload,
    bound_nats: float,
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[Choice | None, list[Choice], int]:
    """Try all settings whose published penalty is known and within the bound.

    Args:
        work: model and network.
        bound_nats: largest acceptable loss penalty beside H = 30, dense, without overlap.
        progress: told which (H, K, tau) comes next, how many of them are done, and of how many.

    Returns:
        The best setting (None: none is within the bound), all settings tried (best first), and the
        number of those left out. A setting is left out where no penalty is published, where it is
        above the bound, or where payloads would pile up on the link.

    Raises:
        Refused: the bound is negative.
    """
    refuse("search", not_negative("loss_bound", bound_nats))
    tried: list[Choice] = []
    left_out = 0
    cuts = list(itertools.product(PERIODS, FRAGMENTS, TAUS))
    for done, (period, fragments, tau) in enumerate(cuts):
        name = f"H={period} K={fragments} tau={tau}"
        if progress is not None:
            progress(name, done, len(cuts))
        base = PlanMethod(name, period, fragments, tau, law=DILOCO)
        if base.violations(work.model.layers) or tau * fragments >= period:
            continue
        options = [
            dataclasses.replace(base, codec=codec, name=f"{name} {codec}")
            for codec in SEARCHED_CODECS
        ]
        known = [
            m
            for m in options
            if _within(m.penalty().nats, bound_nats) and not never_catches_up(m, work)
        ]
        left_out += len(options) - len(known)
        for _, alike in itertools.groupby(known, key=lambda m: m.travels):
            tried += _try(list(alike), work)
    tried.sort(key=lambda c: -c.utilisation)
    if not tried:
        return None, [], left_out
    near = [c for c in tried if c.utilisation >= tried[0].utilisation - NEAR]
    best = min(near, key=lambda c: (c.penalty_nats, c.bytes_per_step))
    return best, tried, left_out


def _within(nats: float | None, bound: float) -> bool:
    return nats is not None and nats <= bound


def _try(methods: list[PlanMethod], work: Workload) -> list[Choice]:
    """Simulate settings together that differ only in their codec and use one route."""
    model = work.model
    times = [exchange_seconds(method, work) for method in methods]
    link_B = np.array([volume for volume, _ in times]) / model.layers
    schedule = dag_schedule(methods[0], model.layers)
    share_B = utilisation(model.layers, work.step_s, link_B, schedule, times[0][1])
    return [
        Choice(m, float(u), m.penalty().nats, m.payload_bytes(model.params) / m.period)
        for m, u in zip(methods, share_B.tolist(), strict=True)
    ]
