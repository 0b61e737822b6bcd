"""Claim: SparseLoCo beats dense DiLoCo at 1 to 3 % density and 2 bits.

    python -m experiments compare --config=configs/paper/sparseloco.py --workdir=runs/sparseloco

Paper: arXiv 2508.15706 (512M to 2B parameters, 8 to 16 regions).

Equal tokens, four regions, three densities (64, 128 and 512 of 4096) against dense DiLoCo and dense
averaging, with short rounds. Entries that are not sent wait in the residual, so the number of
rounds is what counts. Expected at `small` (96 rounds): the gap to averaging closes with density.

Measured (`small`, three seeds, 27 minutes on two busy cores):

| variant | loss | less DiLoCo's | MB sent |
| --- | --- | --- | --- |
| averaging | 1.693 ± 0.035 | | 104 |
| DiLoCo | 1.741 ± 0.088 | | 104 |
| 64 of 4096 | 1.922 ± 0.032 | +0.181 ± 0.062 | 1.6 |
| 128 of 4096 | 1.838 ± 0.050 | +0.097 ± 0.038 | 3 |
| 512 of 4096 | 1.752 ± 0.041 | +0.011 ± 0.054 | 11.5 |

The gap closes with density; no density beats DiLoCo.
"""

from ml_collections import ConfigDict

from configs.paper.scales import NETWORK, nesterov, reproduction
from experiments.compare.config import panel, variant


def get_config() -> ConfigDict:
    """Give the config."""
    return reproduction(variants, small_period=15, small_steps=1440, full_period=30, **NETWORK)


def variants(common: dict, period: int) -> dict:
    """Dense methods and three densities."""
    found = {
        "averaging": variant("local_sgd", method={"period": period}),
        "diloco": variant("diloco", method={"period": period, "outer": nesterov()}),
    }
    for k in (64, 128, 512):
        found[f"sparse_{k:03}"] = variant("sparseloco", method={"period": period, "k": k})
    panels = {"1": panel("entries kept of 4096", tuple(found), "diloco")}
    return {"common": common, "variants": found, "panels": panels, "baseline": "diloco"}
