"""Networks as configs: `--config=configs/network.py:intercontinental`, or a copy as your own.

Presets: lan, datacenter, us_4_regions, consumer_1gbps, intercontinental, aws, aws:Oregon,Tokyo,...
Any mapping with these fields is a network; files in YAML use the same ones.
"""

import dataclasses

import numpy as np
from ml_collections import ConfigDict

from lowcomm_jax.network.links import ENTRIES, Network
from lowcomm_jax.network.parse import JITTERS, TEXTS, parse


def get_config(name: str = "us_4_regions") -> ConfigDict:
    """Give a preset as an editable config."""
    return as_config(parse(name))


def as_config(network: Network) -> ConfigDict:
    """Write a network as the config that `lowcomm_jax.network.parse` reads back."""
    numbers = {e.key: np.array(getattr(network, name)) * e.parts for name, e in ENTRIES}
    jitters = {key: dataclasses.asdict(getattr(network, key)) for key in JITTERS}
    return ConfigDict(
        {
            **{key: getattr(network, key) for key in TEXTS},
            "regions": list(network.regions),
            "symmetric": False,
            **{key: _with_null(values.tolist()) for key, values in numbers.items()},
            **jitters,
        }
    )


def _with_null(values):
    """The numbers with null for no limit."""
    if isinstance(values, list):
        return [_with_null(value) for value in values]
    return None if values == float("inf") else values
