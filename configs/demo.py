"""DeMo (arXiv 2411.19870): the largest cosine coefficients of the momentum, at every step.

    python -m experiments train --config=configs/demo.py --workdir=runs/demo

Expected after 600 steps (1.2M tokens, Python 3.11 sources, one seed): evaluation loss 1.70
(AllReduce: 1.48), 82 MB sent per region (AllReduce: 3.57 GB), in about two minutes on two cores.
Learning rate 1e-3 gives 1.72, 4e-4 2.10, 4e-3 1.95.

`:published` is the paper's 300M setting, on C4 in 8 regions: batches of 2048 sequences, 100B
tokens, k = 32. The learning rate is 4e-4 without weight decay: 250 steps of warm-up, then a cosine
to 10 %.
"""

from ml_collections import ConfigDict

from experiments.config import base, published


def get_config(size: str = "nano") -> ConfigDict:
    """Give the config: `nano` for a laptop, or `published`."""
    if size not in ("nano", "published"):
        raise ValueError(f"size {size!r} is unknown: use nano or published")
    config = base("demo")
    if size == "published":
        config = published(config, model="scaling_330m", regions=8, batch=256, steps=47_700)
        config.inner.warmup_steps = 250
    config.inner.optimizer = "sgd"
    config.inner.learning_rate = 4e-4 if size == "published" else 2e-3
    config.inner.weight_decay = 0.0
    config.inner.clip_norm = None  # it would clip the sign
    return config
