"""Claim: DiLoCo loses little when it synchronises seldom (H = 1000 costs 2.9 % against H = 50).

    python -m experiments compare --config=configs/paper/diloco_period.py --workdir=runs/period

Paper: arXiv 2311.08105 (150M parameters on C4, 8 regions, 88,000 steps; perplexity).

Equal tokens, H from a quarter of the size's period to four times it, one outer rule for all.
Expected at `small`: the loss rises with H, and faster than published, because a run has only 6 to
96 rounds.

Measured (`small`, three seeds, 6 minutes on two cores):

| H | loss | less that of H = 6 |
| --- | --- | --- |
| 6 | 2.106 ± 0.084 | |
| 12 | 2.075 ± 0.065 | -0.031 ± 0.019 |
| 24 | 2.070 ± 0.040 | -0.036 ± 0.048 |
| 48 | 2.095 ± 0.017 | -0.011 ± 0.066 |
| 96 | 2.174 ± 0.056 | +0.068 ± 0.040 |

Up to eight times fewer exchanges cost nothing; 16 times do.
"""

from ml_collections import ConfigDict

from configs.paper.scales import nesterov, reproduction
from experiments.compare.config import panel, variant


def get_config() -> ConfigDict:
    """Give the config."""
    return reproduction(variants, small_period=24)


def variants(common: dict, period: int) -> dict:
    """A variant a period."""
    periods = [period // 4, period // 2, period, 2 * period, 4 * period]
    found = {
        f"h{h:03}": variant("diloco", method={"period": h, "outer": nesterov()}) for h in periods
    }
    base = f"h{periods[0]:03}"
    panels = {"1": panel("inner steps between synchronisations", tuple(found), base)}
    return {"common": common, "variants": found, "panels": panels, "baseline": base}
