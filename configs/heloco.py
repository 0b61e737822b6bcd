"""HeLoCo (arXiv 2606.00271): asynchronous arrivals, aligned with the outer momentum.

    python -m experiments train --config=configs/heloco.py --workdir=runs/heloco

The rates and the strengths of the correction are those of the published code; H and the speeds
are ours, as in `configs/async_local_sgd.py`.
"""

from ml_collections import ConfigDict

from experiments.config import base


def get_config() -> ConfigDict:
    """Give the config."""
    return base("heloco", period=30, speeds=(1.0, 0.9, 0.7, 0.5))
