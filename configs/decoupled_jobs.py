"""Decoupled DiLoCo (arXiv 2604.21428) with one job a learner, which meet through a folder alone.

    python -m experiments launch --regions=3 --exchange=store --config=configs/decoupled_jobs.py

`steps` are those of the fastest learner. The others make fewer; a run ends with a round, and all
with the same model. Kill one: the others go on, and with --restarts=1 it comes back and copies a
peer. docs/regions.md has the rest.
"""

from ml_collections import ConfigDict

from experiments.config import base


def get_config() -> ConfigDict:
    """Give the config."""
    return base(
        "decoupled_diloco",
        period=12,
        overlap=4,
        quorum=1,
        grace=0.8,
        outer={"name": "nesterov", "learning_rate": 0.7, "momentum": 0.9},
    )
