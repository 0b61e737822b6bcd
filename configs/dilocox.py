"""DiLoCoX (arXiv 2506.21263): a round's low-rank int4 payload travels while the next one trains.

    python -m experiments train --config=configs/dilocox.py --workdir=runs/dilocox

The model is cut into two pipeline stages; each holds, codes and sends its own part of both
optimizers' state. A processor is cut into as many virtual devices. Idle ticks and stacked blocks
cost there two to three times the seconds of `--config.mesh.stage=1`. A machine with one accelerator
needs that setting.

Expected after 600 steps (1.2M tokens, Python 3.11 sources, one seed): evaluation loss 2.04 (in one
stage 2.03; AllReduce: 1.48), 6.7 MB sent per region. That takes five minutes of processor time, or
three in one stage. The outer momentum is 0.3: with DiLoCo's 0.9 and a round's delay the loss goes
up and down, and ends at 3.06. Rank and round length shrink as the measured rank does; both are in
metrics.jsonl. The 107B setting of the paper: configs/plan/dilocox_107b.py.
"""

from ml_collections import ConfigDict

from experiments.config import base


def get_config() -> ConfigDict:
    """Give the config."""
    config = base(
        "dilocox",
        period=30,
        rank=16,
        adaptive={"window": 3},
        outer={"name": "nesterov", "learning_rate": 0.4, "momentum": 0.3},
    )
    config.mesh.stage = 2
    return config
