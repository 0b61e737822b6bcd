"""The quick comparison: every method on the laptop model, four regions, Python sources, one WAN.

    python -m experiments

AllReduce, DiLoCo, Streaming DiLoCo with payloads of 4 bits, CoCoDC, DiLoCoX, AdLoCo and NoLoCo at
equal tokens: 1M parameters, 140 steps, H = 20, K = 3, tau = 5. Virtual time is that of the preset
us_4_regions (2 to 5 Gbit/s) with 0.02 s a step, about what a core or two need for one region's.

One seed: the intervals are over the evaluation documents and say nothing of other seeds. Seven
rounds are few, so the outer rules have less momentum than in the methods' own configs. DiLoCoX has
the least, as its outer step comes a whole round late. `--config.seeds="(0,1,2)"` gives intervals
over seeds, `--config.common.steps=1500` more rounds.
"""

import os

from ml_collections import ConfigDict

from experiments.compare.config import comparison, panel, variant


def get_config() -> ConfigDict:
    """Give the config."""
    variants = methods(period=20, fragments=3, overlap=5)
    return comparison(
        variants,
        baseline="allreduce",
        title="Quick comparison",
        panels={"all": panel("", tuple(variants))},
        seeds=(0,),
        parallel=min(len(variants), os.cpu_count() or 1),
        networks=("us_4_regions",),
        step_seconds=0.02,
        keep_checkpoints=False,
        common={
            "steps": 140,
            "regions": 4,
            "batch": 4,
            "codec_error": True,
            "eval": {"every": 14, "sequences": 128},
            "log": {"every": 14},  # where an evaluation ends a block of steps, too
            "checkpoint": {"every": 0},
        },
    )


def methods(period: int, fragments: int, overlap: int) -> dict:
    """Name -> variant: a method added here takes part in everything.

    Args:
      period: H, inner steps between two sends of a fragment.
      fragments: K.
      overlap: tau, inner steps between a send and its landing.
    """
    outer = {"name": "nesterov", "learning_rate": 0.7, "momentum": 0.5}
    shared = {"period": period, "outer": outer}
    staggered = {**shared, "fragments": fragments, "overlap": overlap}
    late = {"name": "nesterov", "learning_rate": 0.4, "momentum": 0.3}
    # Every rank is a program of its own, compiled when it is first used: two are enough here.
    ranks = {"rank": 32, "adaptive": {"buckets": 2}}
    return {
        "allreduce": variant("ddp"),
        "diloco": variant("diloco", method=shared),
        "streaming": variant(
            "streaming_diloco", method={**staggered, "alpha": 0.5, "codec": "e3m0"}
        ),
        "cocodc": variant("cocodc", method=staggered),
        "dilocox": variant("dilocox", method={**shared, "outer": late, **ranks}, mesh={"stage": 1}),
        # Two trainers of half a batch each, by turns, and one microbatch size: one step to compile.
        "adloco": variant(
            "adloco",
            method={
                "period": period,
                "trainers": 2,
                "inner_batching": {"name": "norm", "start": 2, "cap": 16, "microbatches": 2},
                "outer": {"name": "sgd", "learning_rate": 0.7},
            },
            adaptive={"largest_microbatch": 2},
        ),
        "noloco": variant("noloco", method={"period": period}, eval={"per_region": False}),
    }
