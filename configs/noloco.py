"""NoLoCo (arXiv 2506.10911): no all-reduce; every H steps each region averages with one partner.

    python -m experiments train --config=configs/noloco.py --workdir=runs/noloco

Expected after 600 steps (1.2M tokens, Python 3.11 sources, one seed): evaluation loss of the mean
anchor 1.77, of single regions 1.777 to 1.778 (DiLoCo: 1.75, AllReduce: 1.48). A region sends 119
MB and waits for 40 MB of it. The run takes about two minutes on two cores. The pseudo-gradients
travel in bf16, the anchors in fp32.

`:published` is the setting of the paper's code for 125M parameters: 16 regions, H = 50, pairs,
alpha = 0.5, beta = gamma = 0.7, 25,000 steps of 512 sequences. There the tokenizer is larger, and
the stages of the model are routed at random too. Here that needs `--config.mesh.stage=2` or more,
`--config.mesh.region=` the number of regions, and `--config.random_routing=True`.
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
        config.model.layers, config.model.width, config.model.mlp_width = 12, 768, 3072
        config.model.heads, config.model.kv_heads, config.model.head_dim = 12, 12, 64
        config.inner.learning_rate, config.inner.weight_decay = 6e-4, 0.0
        return config
    if size != "nano":
        raise ValueError(f"size {size!r} is unknown: use nano or published")
    config = base("noloco", period=30, codec="bf16")
    config.eval.per_region = True
    return config
