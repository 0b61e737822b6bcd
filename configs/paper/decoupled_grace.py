"""Claim: a grace window gives back what a quorum of one loses, and costs no time.

    python -m experiments compare --config=configs/paper/decoupled_grace.py --workdir=runs/grace

Paper: arXiv 2604.21428 (second-hand: eight learners, half of them 18 % slower; text score 54.4 with
everyone, 51.4 with a quorum of one, 55.3 with a quorum of one and grace).

Four learners of speeds 1, 0.9, 0.75 and 0.6; equal ticks, so equal tokens; H = P = 12, tau = 2.
Everyone waited for, a quorum of one, and the same with grace 0.8, with radial-directional
averaging; the last also with the weighted mean. Payloads that are read one by one are all-gathered,
the mean is reduced: bytes differ.

Measured (`small`, three seeds, 12 runs of about a minute on two busy cores):

| variant | loss | less that of everyone | MB sent by a region |
| --- | --- | --- | --- |
| everyone | 1.970 ± 0.014 | | 126 |
| a quorum of one | | +0.0004 ± 0.026 | 106 |
| with grace | | -0.012 ± 0.020 | 131 |
| with grace and the mean | 2.027 ± 0.008 | | 66 |

With grace the mean's loss is +0.069 ± 0.034 over that of radial-directional averaging. The window
leaves a payload less time to travel: on us_4_regions the run with grace takes 19.5 virtual seconds,
that without 14.4.
"""

from ml_collections import ConfigDict

from configs.paper.scales import NETWORK, nesterov, reproduction
from experiments.compare.config import panel, variant

SPEEDS = (1.0, 0.9, 0.75, 0.6)
ADMISSIONS = {"everyone": (4, 0.0), "quorum_1": (1, 0.0), "grace": (1, 0.8)}


def get_config() -> ConfigDict:
    """Give the config."""
    return reproduction(variants, small_period=12, full_period=24, **NETWORK)


def variants(common: dict, period: int) -> dict:
    """Who is waited for, and how payloads are merged."""

    def one(quorum: int, grace: float, merge: str | None) -> dict:
        method = {"period": period, "overlap": 2, "speeds": SPEEDS, "outer": nesterov(0.4, 0.6)}
        admission = {"quorum": quorum, "grace": grace, "merge": merge}
        return variant("decoupled_diloco", method={**method, **admission})

    found = {name: one(*given, "radial_directional") for name, given in ADMISSIONS.items()}
    found["grace_mean"] = one(*ADMISSIONS["grace"], None)
    panels = {
        "admission": panel("who is waited for", tuple(ADMISSIONS), "everyone"),
        "merge": panel("how payloads are merged", ("grace", "grace_mean"), "grace"),
    }
    return {"common": common, "variants": found, "panels": panels, "baseline": "everyone"}
