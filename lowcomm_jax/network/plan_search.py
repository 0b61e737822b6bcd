"""Find the best H, K, tau and codec for a link under a bound on the loss penalty."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from lowcomm_jax.network.dag import utilisation
from lowcomm_jax.network.plan_methods import BITS, PlanMethod
from lowcomm_jax.network.planner import Workload, dag_schedule, exchange_seconds

PERIODS = (10, 30, 50, 100, 200, 500)
FRAGMENTS = (1, 4, 16)
TAUS = (0, 1, 5, 10)
SEARCHED_CODECS = ("fp32", "bf16", "int8", "int4")
NEAR = (
    0.005  # utilisations this close count as equal; the smaller penalty, then fewer bytes, decides
)


@dataclass(frozen=True)
class Choice:
    """One setting found by the search.

    Attributes:
        method: the setting.
        utilisation: on the given network.
        penalty_nats: published loss penalty beside H = 30.
        bytes_per_step: payload bytes per inner step and region.
    """

    method: PlanMethod
    utilisation: float
    penalty_nats: float
    bytes_per_step: float


def search(work: Workload, bound_nats: float) -> tuple[Choice | None, list[Choice], int]:
    """Try all settings whose published penalty is known and within the bound.

    Args:
        work: model and network.
        bound_nats: largest acceptable loss penalty beside H = 30, dense, without overlap.

    Returns:
        The best setting (None: nothing is within the bound), all settings tried (best first), and
        how many were left out because nothing is published about them or their penalty is above the
        bound.
    """
    tried: list[Choice] = []
    left_out = 0
    for period in PERIODS:
        for fragments in FRAGMENTS:
            for tau in TAUS:
                base = PlanMethod(
                    f"H={period} K={fragments} tau={tau}", period, fragments, tau, route="two_shot"
                )
                if base.violations(work.layers) or tau * fragments >= period:
                    continue
                options = [
                    dataclasses.replace(base, codec=codec, name=f"{base.name} {codec}")
                    for codec in SEARCHED_CODECS
                ]
                known = [
                    m
                    for m in options
                    if m.penalty().nats is not None and m.penalty().nats <= bound_nats
                ]
                left_out += len(options) - len(known)
                tried += _try(known, work)
    tried.sort(key=lambda c: -c.utilisation)
    if not tried:
        return None, [], left_out
    near = [c for c in tried if c.utilisation >= tried[0].utilisation - NEAR]
    best = min(near, key=lambda c: (c.penalty_nats, c.bytes_per_step))
    return best, tried, left_out


def _try(methods: list[PlanMethod], work: Workload) -> list[Choice]:
    """Simulate settings that differ only in their codec together."""
    if not methods:
        return []
    volume, latency = exchange_seconds(dataclasses.replace(methods[0], codec="fp32"), work)
    share_B = np.array([BITS[m.codec] / BITS["fp32"] for m in methods])
    schedule = dag_schedule(methods[0], work.layers)
    share = utilisation(work.layers, work.step_s, volume * share_B / work.layers, schedule, latency)
    size = sum(p.size for p in work.params)
    return [
        Choice(m, float(u), m.penalty().nats, size * BITS[m.codec] / 8.0 / m.period)
        for m, u in zip(methods, share.tolist(), strict=True)
    ]
