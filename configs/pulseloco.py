"""PULSELoCo (arXiv 2602.03839): entries travel where they would change the bf16 anchor.

    python -m experiments train --config=configs/pulseloco.py --workdir=runs/pulseloco

Expected after 600 steps (1.2M tokens, Python 3.11 sources, one seed): evaluation loss 2.08 (DiLoCo:
1.75), 20.7 MB sent per region (119 MB), in about three minutes on two cores.

At this learning rate the gate hardly closes. In a run of 60 steps 99 % of the entries passed it in
the second round, so that the 256 places of a chunk decided what travels. From the weights of a
DiLoCo run, with `--config.model.init_from=... --config.steps=90 --config.inner.warmup_steps=0`:

- `--config.inner.learning_rate=1e-5`: 6.1 % travelled in each of three rounds, at most 6.25 %;
  in the last one 14 % more waited, for want of places.
- `--config.inner.learning_rate=1e-6`: 4.1, 3.6 and 2.4 % travelled, and next to none that had
  passed waited in the last one.
"""

from ml_collections import ConfigDict

from experiments.config import base


def get_config() -> ConfigDict:
    """Give the config."""
    return base(
        "pulseloco", period=30, outer={"name": "nesterov", "learning_rate": 0.7, "momentum": 0.9}
    )
