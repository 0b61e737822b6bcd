"""DiLoCo (arXiv 2311.08105): every region trains alone for H steps, then one outer Nesterov step.

    python -m experiments train --config=configs/diloco.py --workdir=runs/diloco

Expected after 600 steps (1.2M tokens, Python 3.11 sources, one seed): evaluation loss 1.75
(AllReduce: 1.48), 119 MB sent per region, in about two minutes on two cores.

`:published` is the paper's main run: 150M parameters on C4, 8 regions, H = 500, 88,000 steps (of
which the paper spends the first 24,000 without regions; here all are DiLoCo's).
"""

from ml_collections import ConfigDict

from experiments.config import base, published


def get_config(size: str = "nano") -> ConfigDict:
    """Give the config: `nano` for a laptop, or `published`."""
    if size == "published":
        return published(
            base("diloco", period=500, outer={"name": "nesterov"}),
            model="diloco_150m",
            regions=8,
            batch=512,
            steps=88_000,
        )
    if size != "nano":
        raise ValueError(f"size {size!r} is unknown: use nano or published")
    return base(
        "diloco", period=30, outer={"name": "nesterov", "learning_rate": 0.7, "momentum": 0.9}
    )
