"""PULSELoCo (arXiv 2602.03839): entries travel where they would change the bf16 anchor.

    python -m experiments train --config=configs/pulseloco.py --workdir=runs/pulseloco

At the learning rate of this run the gate hardly closes: with 60 steps, 99 % of the entries would
have changed the bf16 anchor in the second round (one seed), and the 256 places of a chunk decide
what travels. The shares that the paper reports are those of post-training.
"""

from ml_collections import ConfigDict

from experiments.config import base


def get_config() -> ConfigDict:
    """Give the config."""
    return base(
        "pulseloco", period=30, outer={"name": "nesterov", "learning_rate": 0.7, "momentum": 0.9}
    )
