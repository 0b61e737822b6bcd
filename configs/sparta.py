"""SPARTA (EXO, 2025): after every step 0.5 % of the parameters are averaged, and nothing else.

    python -m experiments train --config=configs/sparta.py --workdir=runs/sparta

No pseudo-gradient is sent until the end; the model that is evaluated is the mean of the regions.
"""

from ml_collections import ConfigDict

from experiments.config import base


def get_config() -> ConfigDict:
    """Give the config."""
    return base("sparta", p=0.005)
