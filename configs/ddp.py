"""Data parallel training (AllReduce): gradients are averaged over all regions at every step.

    python -m experiments train --config=configs/ddp.py --workdir=runs/ddp

The quality every other method is held against, and the bytes it saves. Expected after 600 steps
(1.2M tokens, Python 3.11 sources, one seed): evaluation loss 1.48, 3.57 GB sent per region, in
about two minutes on two cores.
"""

from ml_collections import ConfigDict

from experiments.config import base


def get_config() -> ConfigDict:
    """Give the config."""
    return base("ddp")
