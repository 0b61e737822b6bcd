"""AdLoCo against DiLoCo at equal virtual time.

    python -m experiments compare --config=configs/compare/adloco_equal_time.py --workdir=runs/adt

Paper: AdLoCo, arXiv 2508.18182. Claim: lower perplexity than DiLoCo at equal time.

The variants `diloco`, `diloco_sgd`, `diloco_norm` and `adloco` of `adloco_vs_diloco.py` at its size
`small`, four regions, three seeds, on us_4_regions with steps of 0.02 s. DiLoCo makes 720 steps.
One pilot run for each of the others finds how many it makes in that time
(`experiments/compare/equal.py`).

Ours, 50 minutes on two very busy cores, ± 95 % over three seeds, differences paired by seed:

| variant | loss | against diloco | virtual s | exchanges | MB sent | tokens |
| --- | --- | --- | --- | --- | --- | --- |
| diloco | 2.085 ± 0.038 | | 16.0 | 24 | 26 | 737k |
| diloco_sgd | 2.196 ± 0.027 | +0.110 ± 0.019 | 16.0 | 24 | 26 | 737k |
| diloco_norm | 2.477 ± 0.365 | +0.392 ± 0.344 | 15.4 | 6.7 | 8.3 | 723k |
| adloco | 2.515 ± 0.084 | +0.430 ± 0.059 | 16.0 | 8.3 | 23 | 743k |

DiLoCo spends 90 % of its time computing here, so that fewer exchanges buy AdLoCo no more than 0.7 %
more tokens: at equal time it does as at equal tokens.
"""

from ml_collections import ConfigDict

from configs.compare import adloco_vs_diloco as study
from experiments.compare.config import comparison, panel

SHOWN = ("diloco", "diloco_sgd", "diloco_norm", "adloco")


def get_config() -> ConfigDict:
    """Give the config."""
    whole = study.get_config().sizes.small.to_dict()
    return comparison(
        {name: whole["variants"][name] for name in SHOWN},
        whole["baseline"],
        equal="time",
        common=whole["common"],
        panels={"diloco": panel("AdLoCo and DiLoCo at equal time", SHOWN)},
        title="AdLoCo at equal time",
        networks=("us_4_regions",),
        step_seconds=0.02,
        keep_checkpoints=False,
    )
