"""AdLoCo against DiLoCo at equal virtual time.

    python -m experiments compare --config=configs/compare/adloco_equal_time.py --workdir=runs/adt

Paper: AdLoCo, arXiv 2508.18182. Claim: lower perplexity than DiLoCo at equal time.

The variants `diloco`, `diloco_sgd`, `diloco_norm` and `adloco` of `adloco_vs_diloco.py` at its size
`small`, four regions, three seeds, on us_4_regions with steps of 0.02 s. DiLoCo makes 720 steps;
what the others make in its time is found in pilot runs, one each (`experiments/compare_equal.py`).
"""

from ml_collections import ConfigDict

from configs.compare import adloco_vs_diloco as study
from experiments.compare_config import comparison, panel

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
