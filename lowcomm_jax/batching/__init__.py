"""How many samples an optimizer step takes: batch policies, and the steps that serve them."""

from lowcomm_jax.batching.adaptive import Adaptive, AugmentedTest, InnerProductTest, NormTest
from lowcomm_jax.batching.base import BatchPolicy, Fixed
from lowcomm_jax.batching.growth import communications, measured_ratio
from lowcomm_jax.batching.statistics import Scope, Statistics, pooled
from lowcomm_jax.batching.switch import Plan, Switch, counts, find_cap

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
    "communications",
    "counts",
    "find_cap",
    "measured_ratio",
    "pooled",
]
