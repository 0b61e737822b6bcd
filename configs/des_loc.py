"""DES-LOC (arXiv 2505.22549): parameters averaged every 30 steps, both moments every 90 and 180.

    python -m experiments train --config=configs/des_loc.py --workdir=runs/des_loc

Regions train with ADOPT and the paper's decays. AdamW is refused: docs/footguns.md says why.
"""

from ml_collections import ConfigDict

from experiments.config import base


def get_config() -> ConfigDict:
    """Give the config."""
    config = base("des_loc", period=30)
    config.inner.update(optimizer="adopt", b1=0.95, b2=0.9999, eps=1e-6)
    return config
