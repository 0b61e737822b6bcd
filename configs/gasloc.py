"""GASLoC (arXiv 2606.11081): every H steps regions gossip, with momentum on what they exchange.

    python -m experiments train --config=configs/gasloc.py --workdir=runs/gasloc

The paper's alpha, gamma and eta were not seen: these are ours, inside the range in which regions
stay together. Not tuned.
"""

from ml_collections import ConfigDict

from experiments.config import base


def get_config() -> ConfigDict:
    """Give the config."""
    config = base("gasloc", period=30, alpha=0.7, gamma=0.5, rate=1.0)
    config.eval.per_region = True
    return config
