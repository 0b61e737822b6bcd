"""SparseLoCo (arXiv 2508.15706): 1.56 % of the entries, 2 bits each, with decayed error feedback.

    python -m experiments train --config=configs/sparseloco.py --workdir=runs/sparseloco

Expected after 600 steps (1.2M tokens, Python 3.11 sources, one seed): evaluation loss 1.86
(AllReduce: 1.48), 5.0 MB sent per region, in about a minute on two cores. With 20 rounds of 30
steps instead of 60 of 10 (`--config.method.period=30`): 2.14 and 1.7 MB.

`:published` has the smallest size of the paper (a 512M model, 8 regions) and 20 tokens a parameter.
Its H of 30 is that of the 72B run of arXiv 2603.08163.
"""

from ml_collections import ConfigDict

from experiments.config import base, published


def get_config(size: str = "nano") -> ConfigDict:
    """Give the config: `nano` for a laptop, or `published`."""
    outer = {"name": "sgd", "learning_rate": 1.0}
    if size == "published":
        return published(
            base("sparseloco", period=30, outer=outer),
            model="scaling_550m",
            regions=8,
            batch=128,
            steps=10_500,
        )
    if size != "nano":
        raise ValueError(f"size {size!r} is unknown: use nano or published")
    return base("sparseloco", period=10, outer=outer)
