"""Claim: NoLoCo, without any all-reduce, is up to 4 % better than DiLoCo.

    python -m experiments compare --config=configs/paper/noloco_gossip.py --workdir=runs/noloco

Paper: arXiv 2506.10911 (125M to 6.8B parameters; NoLoCo with H = 50, DiLoCo with H = 100).

The study of configs/compare/noloco_vs_diloco.py with 8 regions alone: equal H, and the published
pairing. Expected at `small` (8 and 16 rounds of pairs among 8 regions): at equal H gossip mixes
less than an average of all, so it is as good as DiLoCo at best. Twice as many rounds help it.

Measured (`small`, three seeds, 18 runs, about half an hour on two busy cores), loss, and MB sent by
a region; the DiLoCo column is with heavy ball, as published:

| H | NoLoCo | DiLoCo | DiLoCo with Nesterov |
| --- | --- | --- | --- |
| 50 | 2.012 ± 0.012, 23.1 | 2.005 ± 0.016, 20.2 | 2.050 ± 0.010 |
| 100 | 2.074 ± 0.015, 11.6 | 2.041 ± 0.010, 10.1 | 2.126 ± 0.012 |

NoLoCo less DiLoCo, by seed: +0.007 ± 0.027 at H = 50, +0.034 ± 0.021 at H = 100. NoLoCo at H = 50
less DiLoCo at H = 100, as published: -0.029 ± 0.021.
"""

from ml_collections import ConfigDict

from configs.compare.noloco_vs_diloco import versus
from configs.paper.scales import reproduction


def get_config() -> ConfigDict:
    """Give the config."""
    return reproduction(variants, small_steps=800)


def variants(common: dict, period: int) -> dict:
    """The study with 8 regions; its periods are the published ones in both sizes."""
    return versus(common, batch=8 * common["batch"], counts=(8,))
