r"""AdLoCo (arXiv 2508.18182): several trainers a region, adaptive batches, and the switch mode.

Every trainer runs DiLoCo's rounds (`diloco`) with the batch b_i that it asked for,

.. math::
   \bar\Delta_i = \tfrac1R \sum_r (\Theta_i - \theta_{i,r}), \qquad
   \Theta_i \leftarrow \mathrm{SGD}(\Theta_i, \bar\Delta_i), \qquad
   b_i \leftarrow \max(b_i, \lceil T_i \rceil)

with T_i the batch that the noise of its gradients asks for (`rules.batching`). Every
`merge_every` rounds the trainers of the smallest requests merge, weighted by their requests
(`rules.trainers`). Batches beyond what fits into memory are accumulated (`adloco.step_plan`).

====== ======================================= =====================
symbol meaning                                 argument
====== ======================================= =====================
H      inner optimizer steps per round         `period`
k      trainers at the start                   `trainers`
eta    outer learning rate                     in `outer` (0.5)
T      batch that the test asks for            `test` and its bounds
n      caps above which gradients accumulate   `threshold`
====== ======================================= =====================

Differs from the paper's code:

- Statistics are taken at one point, of microbatches inside a region, and with the right dimension.
  In the code the orthogonality test is about d times too small, and the inner-product test lacks
  b / M and reads nu. Its bounds (eta 0.8, vartheta 0.01, nu 0.3) therefore mean nothing here.
- A decision takes effect one round later.
- Inner moments are kept across rounds.
- Every trainer draws from the whole shard of its region in an order of its own. So no data stays
  unread when a trainer is merged into another.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import optax

from lowcomm_jax.methods.base import Method
from lowcomm_jax.methods.diloco import diloco
from lowcomm_jax.rules.batching import AugmentedTest, Fixed, InnerProductTest, NormTest
from lowcomm_jax.rules.outer import sgd
from lowcomm_jax.rules.trainers import Choose, Moments, Trainers

TESTS: dict[str, Any] = {
    "fixed": Fixed,
    "norm": NormTest,
    "inner_product": InnerProductTest,
    "augmented": AugmentedTest,
}


def adloco(
    period: int,
    trainers: int = 4,
    merge_every: int | None = 2,
    test: Literal["augmented", "inner_product", "norm", "fixed"] = "augmented",
    start_batch: int = 1,
    max_batch: int = 64,
    choose: Choose = "worst_with_worst",
    moments: Moments = "merge",
    hurt_bound: float | None = None,
    threshold: float = 2.0,
    eta: float | None = None,
    theta: float | None = None,
    nu: float | None = None,
    microbatches: int = 4,
    scope: Literal["within", "across"] = "within",
    smoothing: float = 0.5,
    growth: float | None = None,
    monotone: bool = True,
    outer: optax.GradientTransformation | None = None,
    codec: Any = None,
    inner_batching: Any = None,
) -> Method:
    """Train several trainers a region with adaptive batches; needs a `lowcomm_jax.AdaptiveEngine`.

    Args:
      trainers: k, trainers of a region at the start.
      merge_every: rounds between two merges of trainers; None = never.
      choose: which two merge: `worst_with_worst`, those of the smallest requests; or
        `best_with_worst`, the smallest into the largest.
      moments: of a merge: `merge` the inner optimizer's moments, too, or `reset` them.
      hurt_bound: largest rise of the loss that a merge may cause, or else it is undone; None = no
        bound.
      test: what decides the batch; `fixed` keeps `start_batch`.
      start_batch: samples of one trainer per region and step, at first.
      max_batch: the same, at most.
      threshold: requests above this many times the largest microbatch are accumulated; those
        between are cut to it (`adloco.step_plan.Switch`).
      eta: bound of `norm`: tolerated noise to signal; None = 0.8.
      theta: bound of `inner_product` and `augmented`: tolerated noise along the gradient, as a
        share of it; None = 0.9.
      nu: bound of `augmented`: tolerated noise orthogonal to the gradient; None = 5.84.
      microbatches: gradients that each region measures per decision.
      scope: mean that deviations are measured from: `within` a region, or `across` all regions.
      smoothing: weight of past measurements in their averages, in [0, 1).
      growth: largest factor by which one decision raises the batch, above 1; None = no limit.
      monotone: whether the batch never shrinks.
      outer: Optax transform of the mean pseudo-gradient; default SGD 0.5 without momentum.
      period, codec: as in `diloco`.
      inner_batching: a policy in place of `test` and all that describes it.
    """
    problems: list[str] = []
    bounds = {"eta": eta, "theta": theta, "nu": nu}
    settings = {"microbatches": microbatches, "scope": scope, "smoothing": smoothing}
    settings |= {"growth": growth, "monotone": monotone, "cap": max_batch}
    if inner_batching is None and test not in TESTS:
        problems.append(f"test={test!r}: use {', '.join(TESTS)}")
    elif inner_batching is None:
        reads = {field.name for field in dataclasses.fields(TESTS[test])}
        given = {name: value for name, value in bounds.items() if value is not None}
        problems += [
            f"{name}={value}: the {test} test does not read it; leave it out"
            for name, value in given.items()
            if name not in reads
        ]
        known = {name: value for name, value in (settings | given).items() if name in reads}
        inner_batching = TESTS[test](start=start_batch, **known)
    plain = diloco(period, outer or sgd(0.5), codec, inner_batching)
    return dataclasses.replace(
        plain,
        name="adloco",
        trainers=Trainers(trainers, merge_every, choose, moments, hurt_bound, threshold),
        problems=(*problems, *plain.problems),
    )
