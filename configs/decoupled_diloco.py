"""Decoupled DiLoCo (arXiv 2604.21428): learners of unequal speed, of which none waits.

    python -m experiments train --config=configs/decoupled_diloco.py --workdir=runs/decoupled

Four learners, the slowest at half the speed of the fastest; region 3 is down from tick 200 to 240
and then copies a peer. Add `--config.method.quorum=4 --config.method.grace=0.0` to wait for
everyone, or `--config.method.merge=None` for the weighted mean.
"""

from ml_collections import ConfigDict

from experiments.config import base


def get_config() -> ConfigDict:
    """Give the config."""
    return base(
        "decoupled_diloco",
        period=12,
        overlap=2,
        quorum=1,
        grace=0.8,
        speeds=(1.0, 0.9, 0.7, 0.5),
        outages=((3, 200, 240),),
        outer={"name": "nesterov", "learning_rate": 0.7, "momentum": 0.9},
    )
