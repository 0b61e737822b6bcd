"""Claim: CoCoDC needs 21.0 % fewer steps than Streaming DiLoCo to a target perplexity.

    python -m experiments compare --config=configs/paper/cocodc_steps.py --workdir=runs/cocodc_steps

Paper: arXiv 2504.17672 (150M parameters on C4, four regions, H = 100, K = 4, tau = 5, CoCoDC with
twice the bytes, one seed).

The study of configs/compare/cocodc_vs_streaming.py at tau = 5 alone: equal bytes, twice the bytes,
and the paper's pairing. Expected at `small` (24 rounds, H = 30): a delay of five steps matters
little, so the Taylor forms lie within one another's intervals. What is left between the two methods
is the schedule and Streaming's mixing with the local value (alpha).

Measured (`small`, three seeds, about a quarter of an hour on two cores):

| variant | loss | steps to loss 2.2 | MB sent |
| --- | --- | --- | --- |
| Streaming, alpha 0.5 | 1.966 ± 0.031 | 333 | 27 |
| Streaming, alpha 0 | 2.094 ± 0.045 | 448 | 27 |
| CoCoDC, lambda 0.5 | 2.091 ± 0.053 | 442 | 27 |
| CoCoDC, norm-scaled | 2.092 ± 0.039 | 444 | 27 |
| CoCoDC, lambda 0.5, N = 2K | 2.102 ± 0.054 | 491 | 59 |
| CoCoDC, norm-scaled, N = 2K | 2.081 ± 0.079 | 464 | 59 |

CoCoDC needs 33 % more steps than Streaming with alpha 0.5 at equal bytes. Against alpha 0 there is
no evidence of a difference.
"""

from ml_collections import ConfigDict

from configs.compare.cocodc_vs_streaming import study
from configs.paper.scales import reproduction


def get_config() -> ConfigDict:
    """Give the config."""
    return reproduction(variants)


def variants(common: dict, period: int) -> dict:
    """The study at the paper's delay, H / K as in each size."""
    small = period < 100
    found = study(
        period=period,
        fragments=3 if small else 4,
        common=common,
        batch=common["batch"],
        taus=(5,),
    )
    return found | ({"target": 2.2} if small else {})
