"""HALoS (arXiv 2506.04531): workers of unequal speed, two local servers, one global server.

    python -m experiments train --config=configs/halos.py --workdir=runs/halos

Eight workers in two groups; a local server sends after 8 arrivals, over a link of 4 ticks. Rates
and momenta are the published ones, with buffers as large as the groups.
"""

from ml_collections import ConfigDict

from experiments.config import base


def get_config() -> ConfigDict:
    """Give the config."""
    config = base(
        "halos",
        period=16,
        speeds=(1.0, 0.9, 0.8, 0.7, 1.0, 0.8, 0.6, 0.4),
        groups=((0, 1, 2, 3), (4, 5, 6, 7)),
        every=8,
        learning_rate=0.8,
        buffer=4,
        travel=4,
    )
    config.regions = 8
    return config
