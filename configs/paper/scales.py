"""What the reproductions share: their two sizes, and the outer rule of dense DiLoCo."""

from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from configs.compare import cocodc_vs_streaming as study
from experiments.compare.config import comparison

REGIONS, BATCH = 4, 4
NETWORK = {"networks": ("us_4_regions",), "step_seconds": 0.02}


def reproduction(
    make: Callable[[dict, int], dict],
    small_period: int = 30,
    small_steps: int = 720,
    full_period: int = 100,
    **changes: Any,
) -> ConfigDict:
    """A comparison in two sizes.

    Args:
      make: (fields all variants share, H) -> variants, panels and baseline of a size.
      small_period, small_steps: of `small`, 0.18M parameters and context 64: minutes on two cores.
      full_period: of `full`, 150M parameters on C4 for 24,000 steps: a cluster.
      changes: other fields of the comparison.
    """
    small, full = study.small(small_steps), study.gpu(24_000)
    full["model"] = {"preset": "diloco_150m", "compute_dtype": "bfloat16"}
    full["data"] = {**full["data"], "seq_len": 1024, "limit": 10_000_000}
    full["inner"] = {"learning_rate": 4e-4, "warmup_steps": 1000}
    sizes = {"regions": REGIONS, "batch": BATCH}
    return comparison(
        size="small",
        sizes={
            "small": make(small | sizes, small_period),
            "full": make(full | sizes | {"batch": 64}, full_period),
        },
        keep_checkpoints=False,
        **changes,
    )


def nesterov(learning_rate: float = 0.4, momentum: float = 0.9) -> dict:
    """An outer rule; the default is the best of configs/compare/cocodc_outer_lr.py for DiLoCo."""
    return {"name": "nesterov", "learning_rate": learning_rate, "momentum": momentum}
