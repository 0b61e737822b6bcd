"""EDiT (arXiv 2412.07210): workers with long pseudo-gradients count less, outliers nothing.

    python -m experiments train --config=configs/edit.py --workdir=runs/edit

Outlier threshold, decay and warm-up are those of the published code. At H = 30 this run has fewer
rounds than its warm-up, so that no outlier is looked for: `--config.method.warm_up=5` does.
"""

from ml_collections import ConfigDict

from experiments.config import base


def get_config() -> ConfigDict:
    """Give the config."""
    return base(
        "edit", period=30, outer={"name": "nesterov", "learning_rate": 0.7, "momentum": 0.9}
    )
