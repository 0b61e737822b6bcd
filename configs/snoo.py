"""SNOO (arXiv 2510.15830): one region, and an outer Nesterov step every 100 of its steps.

    python -m experiments train --config=configs/snoo.py --workdir=runs/snoo

The values are the best that are known for 125M parameters.
"""

from ml_collections import ConfigDict

from experiments.config import base


def get_config() -> ConfigDict:
    """Give the config."""
    config = base("snoo", period=100, learning_rate=0.8, momentum=0.75)
    config.regions = 1
    return config
