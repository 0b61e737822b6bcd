"""DiLoCoX (arXiv 2506.21263): a round's low-rank int4 payload travels while the next one trains.

    python -m experiments train --config=configs/dilocox.py --workdir=runs/dilocox

Expected after 600 steps (1.2M tokens, Python 3.11 sources, one seed): evaluation loss 2.84
(AllReduce: 1.48; the same delay without a codec: 2.68), 8.2 MB sent per region, in about three
minutes on two cores. Rank and round length shrink as the measured rank does; both are in
metrics.jsonl. --config.method.shared_basis=True projects on bases that all regions have in common
instead of each on its own. Where devices allow, --config.mesh.stage=2 cuts the model into pipeline
stages. The 107B setting of the paper: configs/plan/dilocox_107b.py.
"""

from ml_collections import ConfigDict

from experiments.config import base


def get_config() -> ConfigDict:
    """Give the config."""
    return base(
        "dilocox",
        period=30,
        rank=16,
        adaptive={"window": 3},
        outer={"name": "nesterov", "learning_rate": 0.4, "momentum": 0.9},
    )
