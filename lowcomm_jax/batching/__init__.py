"""Batch policies: how many samples an optimizer step takes, and in which microbatches.

In: the noise of the regions' gradients, measured and reduced (`Statistics`). Out: the batch of a
region's next steps (`BatchPolicy.decide`), and a plan of microbatches that fit into memory
(`Switch`, `find_cap`). `trainers` says when several trainers of a region merge. The room `adaptive`
measures and trains; this one decides.
"""

from lowcomm_jax.batching.adaptive import Adaptive, AugmentedTest, InnerProductTest, NormTest
from lowcomm_jax.batching.base import BatchPolicy, Fixed
from lowcomm_jax.batching.statistics import Scope, Statistics, pooled
from lowcomm_jax.batching.switch import Plan, Switch, find_cap

__all__ = [
    "Adaptive",
    "AugmentedTest",
    "BatchPolicy",
    "Fixed",
    "InnerProductTest",
    "NormTest",
    "Plan",
    "Scope",
    "Statistics",
    "Switch",
    "find_cap",
    "pooled",
]
