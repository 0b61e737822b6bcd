"""DES-LOC (arXiv 2505.22549): parameters averaged every 30 steps, Adam's moments every 90 and 180.

python -m experiments train --config=configs/des_loc.py --workdir=runs/des_loc
"""

from ml_collections import ConfigDict

from experiments.config import base


def get_config() -> ConfigDict:
    """Give the config."""
    return base("des_loc", period=30)
