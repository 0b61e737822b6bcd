"""Claim: more regions (and so more data at equal steps) make DiLoCo better.

    python -m experiments compare --config=configs/paper/diloco_replicas.py --workdir=runs/replicas

Paper: arXiv 2311.08105, perplexity of 150M parameters on C4, H = 500: one worker 16.23, four 15.18,
8 15.02, 16 14.91, 64 14.96 (each worker with a shard of its own topics).

Equal steps, not equal tokens: k regions train on k times the tokens, as in the paper. Expected at
`small`: the loss falls from one region to four, less from four to 8.

Measured (`small`, three seeds, 7 minutes on two cores):

| regions | loss | less that of one |
| --- | --- | --- |
| 1 | 2.144 ± 0.057 | |
| 2 | 2.088 ± 0.058 | -0.056 ± 0.100 |
| 4 | 2.066 ± 0.039 | -0.078 ± 0.096 |
| 8 | 2.046 ± 0.060 | -0.098 ± 0.093 |

The order is the published one; three seeds tell only 8 from one.
"""

from ml_collections import ConfigDict

from configs.paper.scales import nesterov, reproduction
from experiments.compare.config import panel, variant

COUNTS = (1, 2, 4, 8)


def get_config() -> ConfigDict:
    """Give the config."""
    return reproduction(variants, equal="steps")


def variants(common: dict, period: int) -> dict:
    """A variant a number of regions; one region has the outer rule, too."""
    method = {"period": period, "outer": nesterov()}
    found = {f"regions_{k}": variant("diloco", method=method, regions=k) for k in COUNTS}
    panels = {"1": panel("regions", tuple(found), "regions_1")}
    return {"common": common, "variants": found, "panels": panels, "baseline": "regions_1"}
