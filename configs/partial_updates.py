"""Partial parameter updates (arXiv 2509.22418): every region trains a part of each MLP matrix.

    python -m experiments train --config=configs/partial_updates.py --workdir=runs/partial

The part is a share of the matrix's columns, and all else is trained everywhere. Shares and rates
are ours.
"""

from ml_collections import ConfigDict

from experiments.config import base


def get_config() -> ConfigDict:
    """Give the config."""
    roles = {"name": "shares", "leaves": "mlp/", "axis": 1}
    outer = {"name": "nesterov", "learning_rate": 0.7, "momentum": 0.9}
    return base("partial_updates", period=30, roles=roles, outer=outer)
