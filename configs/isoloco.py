"""IsoLoCo (arXiv 2607.03011): DiLoCo along a mean whose singular values are made equal.

    python -m experiments train --config=configs/isoloco.py --workdir=runs/isoloco

H and the outer rates are those of the published code (178M and 512M parameters, 8 regions).
"""

from ml_collections import ConfigDict

from experiments.config import base


def get_config() -> ConfigDict:
    """Give the config."""
    return base(
        "isoloco", period=30, outer={"name": "nesterov", "learning_rate": 1.8, "momentum": 0.8}
    )
