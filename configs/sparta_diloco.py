"""SPARTA with DiLoCo (EXO, 2025): 0.5 % of the parameters every step, an outer step every H.

python -m experiments train --config=configs/sparta_diloco.py --workdir=runs/sparta_diloco
"""

from ml_collections import ConfigDict

from experiments.config import base


def get_config() -> ConfigDict:
    """Give the config."""
    return base(
        "sparta",
        p=0.005,
        period=30,
        outer={"name": "nesterov", "learning_rate": 0.7, "momentum": 0.9},
    )
