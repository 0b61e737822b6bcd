"""DiLoCo with an outer momentum that is set to zero every three rounds (arXiv 2605.28585).

    python -m experiments train --config=configs/restarted_diloco.py --workdir=runs/restarted

K and the outer rates are those of a replication (Llama-150M, two workers, H from 64 to 2048).
"""

from ml_collections import ConfigDict

from experiments.config import base


def get_config() -> ConfigDict:
    """Give the config."""
    return base("restarted_diloco", period=30, every=3, learning_rate=0.9, momentum=0.7)
