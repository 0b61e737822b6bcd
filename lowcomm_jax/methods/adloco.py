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

- Statistics are taken at one point, of microbatches inside a region, and with the right dimension
  (`rules.batching`). So the code's bounds (eta 0.8, vartheta 0.01, nu 0.3) mean nothing here.
- A decision takes effect one round later.
- Inner moments are kept across rounds, and averaged in a merge.
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
from lowcomm_jax.rules.trainers import Choose, Trainers

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
    threshold: float = 2.0,
    eta: float | None = None,
    theta: float | None = None,
    nu: float | None = None,
    microbatches: int = 4,
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
      merge_every, choose, threshold: see `rules.trainers.Trainers`.
      test: what decides the batch; `fixed` keeps `start_batch`.
      start_batch: samples of one trainer per region and step, at first.
      max_batch: the same, at most.
      eta, theta, nu: bounds of the tests that read them, see `rules.batching`; None = their
        defaults.
      microbatches, smoothing, growth, monotone: see `rules.batching.Adaptive`.
      outer: Optax transform of the mean pseudo-gradient; default SGD 0.5 without momentum.
      period, codec: as in `diloco`.
      inner_batching: a policy in place of `test` and all that describes it.
    """
    problems: list[str] = []
    bounds = {"eta": eta, "theta": theta, "nu": nu}
    settings = {"microbatches": microbatches, "smoothing": smoothing, "growth": growth}
    settings |= {"monotone": monotone, "cap": max_batch}
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
        trainers=Trainers(trainers, merge_every, choose, threshold),
        problems=(*problems, *plain.problems),
    )
