"""A-EDiT (arXiv 2412.07210): a round is a time, in which workers make as many steps as they can.

    python -m experiments train --config=configs/a_edit.py --workdir=runs/a_edit

Four workers of different speed; a round of 15 s holds 30 steps of the fastest. The speeds are ours.
"""

from ml_collections import ConfigDict

from experiments.config import base


def get_config() -> ConfigDict:
    """Give the config."""
    outer = {"name": "nesterov", "learning_rate": 0.7, "momentum": 0.9}
    return base("a_edit", seconds=15.0, step_seconds=0.5, speeds=(1.0, 0.9, 0.7, 0.5), outer=outer)
