"""Asynchronous local SGD (arXiv 2401.09135): every arrival moves the anchor at once.

    python -m experiments train --config=configs/async_local_sgd.py --workdir=runs/async_local_sgd

With a job a region, which arrive when they are done; the speeds then say only after how many steps:

    python -m experiments launch --regions=4 --exchange=store --config=configs/async_local_sgd.py

Expected after 600 steps (1.2M tokens, Python 3.11 sources, one seed): evaluation loss 1.83
(AllReduce: 1.48), 238 MB sent per region, in about two minutes on two cores.
"""

from ml_collections import ConfigDict

from experiments.config import base


def get_config() -> ConfigDict:
    """Give the config."""
    return base("async_local_sgd", period=30, speeds=(1.0, 0.9, 0.7, 0.5))
