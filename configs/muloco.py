"""MuLoCo (arXiv 2505.23725): Muon inside, 4 bits with error feedback between regions.

    python -m experiments train --config=configs/muloco.py --workdir=runs/muloco

Expected after 600 steps (1.2M tokens, Python 3.11 sources, one seed): evaluation loss 1.53
(AllReduce: 1.48 with AdamW), 30 MB sent per region, in about a minute on two cores.

`:published` has a size of the paper (416M, 8 workers, H = 30); its batch, length (20 tokens a
parameter) and learning rate are ours.
"""

from ml_collections import ConfigDict

from experiments.config import base, published


def get_config(size: str = "nano") -> ConfigDict:
    """Give the config: `nano` for a laptop, or `published`."""
    if size not in ("nano", "published"):
        raise ValueError(f"size {size!r} is unknown: use nano or published")
    config = base(
        "muloco", period=30, outer={"name": "nesterov", "learning_rate": 0.7, "momentum": 0.6}
    )
    if size == "published":
        config = published(config, model="diloco_400m", regions=8, batch=64, steps=16_000)
    config.inner.optimizer = "muon"
    return config
