"""DiLoCo's period and outer learning rate: what fewer synchronisations cost.

    python -m experiments compare --config=configs/compare/diloco_period.py --workdir=runs/period

Nine runs of the laptop model at equal tokens, one seed, with virtual time on us_4_regions: about
ten minutes on two cores. Other fields, on a grid or at random:

    python -m experiments compare --config=configs/compare/diloco_period.py \\
        --vary=method.period=5,50 "--vary=inner.learning_rate=log(5e-4,5e-3)" --config.draws=8 \\
        --workdir=runs/mine
"""

import os

from ml_collections import ConfigDict

from experiments.compare.config import comparison, variant


def get_config() -> ConfigDict:
    """Give the config."""
    return comparison(
        {"diloco": variant("diloco")},
        "diloco",
        vary=("method.period=10,30,90", "method.outer.learning_rate=0.4,0.7,1.0"),
        seeds=(0,),
        title="DiLoCo: period and outer learning rate",
        networks=("us_4_regions",),
        step_seconds=0.02,
        parallel=os.cpu_count() or 1,
        keep_checkpoints=False,
        common={
            "steps": 360,
            "regions": 4,
            "batch": 4,
            "method": {"outer": {"momentum": 0.5}},
            "eval": {"every": 60, "sequences": 128},
            "checkpoint": {"every": 0},
        },
    )
