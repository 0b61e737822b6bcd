"""Streaming DiLoCo (arXiv 2501.18512): one fragment at a time, hidden behind tau inner steps.

    python -m experiments train --config=configs/streaming_diloco.py --workdir=runs/streaming_diloco

Payloads are of 4 bits (E3M0), as in the paper. Expected after 600 steps (1.2M tokens, Python 3.11
sources, one seed): evaluation loss 1.74 (AllReduce: 1.48), 33 MB sent per region, in about a minute
on two cores. With fp32 payloads (`--config.method.codec=None`): 1.76 and 125 MB.

`:published` is the setting of the paper: 2 regions, H = 100, fragments of 3 blocks, tau = 1,
alpha = 0.5.
"""

from ml_collections import ConfigDict

from experiments.config import base, published


def get_config(size: str = "nano") -> ConfigDict:
    """Give the config: `nano` for a laptop, or `published`."""
    if size == "published":
        return published(
            base(
                "streaming_diloco",
                period=100,
                fragments=8,
                overlap=1,
                alpha=0.5,
                codec="e3m0",
                outer={"name": "nesterov", "learning_rate": 0.4, "momentum": 0.9},
            ),
            model="scaling_1_3b",
            regions=2,
            batch=256,
            steps=50_000,
        )
    if size != "nano":
        raise ValueError(f"size {size!r} is unknown: use nano or published")
    return base(
        "streaming_diloco",
        period=30,
        fragments=3,
        overlap=5,
        alpha=0.5,
        codec="e3m0",
        outer={"name": "nesterov", "learning_rate": 0.4, "momentum": 0.9},
    )
