"""The quick comparison: six methods, four regions, Python sources, minutes on two cores.

    python -m experiments

One seed: the intervals are over the evaluation documents and say nothing of other seeds.
"""

import os

from ml_collections import ConfigDict

from experiments.compare_config import comparison, variant

PERIOD, FRAGMENTS, OVERLAP = 30, 3, 5  # H, K, tau


def get_config() -> ConfigDict:
    """Give the config."""
    variants = methods()
    return comparison(
        variants,
        baseline="allreduce",
        seeds=(0,),
        parallel=min(len(variants), os.cpu_count() or 1),
        networks=("us_4_regions",),
        step_seconds=0.02,
        keep_checkpoints=False,
        common={
            "steps": 300,
            "regions": 4,
            "batch": 4,
            "eval": {"every": 30, "sequences": 128},
            "log": {"every": 15},
            "checkpoint": {"every": 0},
        },
    )


def methods() -> dict:
    """Name -> variant: add a method here and it takes part."""
    staggered = {"fragments": FRAGMENTS, "overlap": OVERLAP}
    return {
        "allreduce": variant("ddp"),
        "diloco": variant("diloco", method={"period": PERIOD, "outer": outer(0.4)}),
        "streaming_e3m0": variant(
            "streaming_diloco",
            method={
                "period": PERIOD,
                "alpha": 0.5,
                "codec": "e3m0",
                "outer": outer(0.7),
                **staggered,
            },
        ),
        "cocodc": variant("cocodc", method={"period": PERIOD, "outer": outer(0.4), **staggered}),
        "dilocox": variant("dilocox", method={"period": PERIOD, "outer": outer(0.4)}),
        "noloco": variant("noloco", method={"period": PERIOD}, eval={"per_region": False}),
    }


def outer(rate: float) -> dict:
    """Nesterov; the rates are the winners of configs/compare/cocodc_outer_lr.py."""
    return {"name": "nesterov", "learning_rate": rate, "momentum": 0.9}
