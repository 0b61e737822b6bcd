"""Claim: AdLoCo reaches a lower loss than DiLoCo with fewer communications.

    python -m experiments compare --config=configs/paper/adloco_communications.py --workdir=runs/ad

Paper: arXiv 2508.18182 (MicroLLaMA of 300M parameters on C4; the exchanges grow with the logarithm
of the samples).

The study of configs/compare/adloco_vs_diloco.py: AdLoCo, DiLoCo, and AdLoCo without each of its
parts, at equal tokens. Expected at `small` (737k tokens): about a third of the exchanges, as
batches grow 32-fold; and a higher loss, for that leaves a small model with few steps.

Measured (`small`, three seeds, 28 minutes on two busy cores):

| method | loss | exchanges | MB sent |
| --- | --- | --- | --- |
| DiLoCo | 2.085 ± 0.038 | 24 | 26 |
| AdLoCo | 2.517 ± 0.085 | 8.3 | 23 |
| AdLoCo with one trainer | 2.364 ± 0.021 | 10 | 12 |
| AdLoCo without growing batches | 2.072 ± 0.024 | 84 | 104 |

AdLoCo communicates less often, at a loss 0.431 ± 0.060 higher.
"""

from ml_collections import ConfigDict

from configs.compare.adloco_vs_diloco import START, parts
from configs.paper.scales import NETWORK, reproduction


def get_config() -> ConfigDict:
    """Give the config."""
    return reproduction(variants, title="AdLoCo and its parts", **NETWORK)


def variants(common: dict, period: int) -> dict:
    """The study, with batches to the size."""
    return parts(period, common, scale=common["batch"] // START)
