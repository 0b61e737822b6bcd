"""DiLoCo's period and outer learning rate: what fewer synchronisations cost.

    python -m experiments sweep --config=configs/sweep/diloco_period.py --workdir=runs/sweep

Nine runs of the laptop model at equal tokens, one seed, with virtual time on us_4_regions: about
ten minutes on two cores. A sweep of your own over any field, on a grid or at random:

    python -m experiments sweep --config=configs/sweep/diloco_period.py --config.config=cocodc \\
        --config.over="('method.taylor=0,0.5,1', 'inner.learning_rate=log(5e-4,5e-3)')" \\
        --config.draws=8 --workdir=runs/mine
"""

import os

from ml_collections import ConfigDict

from experiments.sweep.config import sweep


def get_config() -> ConfigDict:
    """Give the config."""
    return sweep(
        "diloco",
        ("method.period=10,30,90", "method.outer.learning_rate=0.4,0.7,1.0"),
        title="DiLoCo: period and outer learning rate",
        networks=("us_4_regions",),
        step_seconds=0.02,
        parallel=os.cpu_count() or 1,
        common={
            "steps": 360,
            "regions": 4,
            "batch": 4,
            "method": {"outer": {"momentum": 0.5}},
            "eval": {"every": 60, "sequences": 128},
            "checkpoint": {"every": 0},
        },
    )
