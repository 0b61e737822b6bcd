"""NoLoCo (arXiv 2506.10911): no all-reduce; every H steps each region averages with one partner.

    python -m experiments train --config=configs/noloco.py --workdir=runs/noloco

MEASURED

`:published` is the setting of the paper's code for 125M parameters: 16 regions, H = 50, pairs,
alpha = 0.5, beta = gamma = 0.7, 25,000 steps of 0.52M tokens. There the stages of the model are
routed at random too, which this config does not do.
"""

from ml_collections import ConfigDict

from experiments.config import base, published


def get_config(size: str = "nano") -> ConfigDict:
    """Give the config: `nano` for a laptop, or `published`."""
    if size == "published":
        config = published(
            base("noloco", period=50, codec="bf16"),
            model="diloco_150m",
            regions=16,
            batch=32,
            steps=25_000,
        )
        config.inner.learning_rate = 6e-4
        config.inner.weight_decay = 0.0
        return config
    if size != "nano":
        raise ValueError(f"size {size!r} is unknown: use nano or published")
    config = base("noloco", period=30, codec="bf16")
    config.eval.per_region = True
    return config
