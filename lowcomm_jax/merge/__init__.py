"""Merge rules: how the payloads of those who took part become one direction, before the outer rule.

In: for one tensor, the decoded pseudo-gradients of all regions and their weights, or their mean.
Out: the direction that the outer rule descends along. Without a rule that is the weighted mean,
which the exchange reduces.

A rule that reads payloads one by one costs bytes: every region then receives those of all others.
"""

from lowcomm_jax.merge.align import Align
from lowcomm_jax.merge.base import Merge, merge_leaves
from lowcomm_jax.merge.isotropic import Isotropic
from lowcomm_jax.merge.radial_directional import RadialDirectional
from lowcomm_jax.merge.registry import RULES, make

__all__ = ["RULES", "Align", "Isotropic", "Merge", "RadialDirectional", "make", "merge_leaves"]
