"""Claim: NoLoCo, without any all-reduce, is up to 4 % better than DiLoCo.

    python -m experiments compare --config=configs/paper/noloco_gossip.py --workdir=runs/noloco

Paper: arXiv 2506.10911. The study and its sizes are in configs/compare/noloco_vs_diloco.py, what we
measured in docs/RESULTS.md.
"""

from configs.compare.noloco_vs_diloco import get_config

__all__ = ["get_config"]
