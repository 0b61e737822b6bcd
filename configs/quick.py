"""The demonstration of `python -m experiments`: DiLoCo, four regions, Python sources.

python -m experiments
"""

from ml_collections import ConfigDict

from experiments.config import base


def get_config() -> ConfigDict:
    """Give the config."""
    config = base(
        "diloco", period=30, outer={"name": "nesterov", "learning_rate": 0.7, "momentum": 0.9}
    )
    config.steps = 1500
    config.eval.every = 60
    config.checkpoint.every = 0  # short enough to save only at the end, or when interrupted
    return config
