"""SPES (arXiv 2602.11543): every region trains experts of its own, and all train the rest.

    python -m experiments train --config=configs/spes.py --workdir=runs/spes \
        --config.model=examples.mixture_of_experts:Mixture

It needs a model with experts; the names of leaves here are those of examples/mixture_of_experts.py.
H, the steps between merges and the step from which nothing merges are a tenth of the published
code's, since the run is short.
"""

from ml_collections import ConfigDict

from experiments.config import base


def get_config() -> ConfigDict:
    """Give the config."""
    merges = {"compare": "experts/up$", "merge_every": 20, "until": 200}
    return base("spes", period=10, experts="experts/", **merges)
