r"""Decoupled DiLoCo (arXiv 2604.21428): independent learners, a quorum and a grace window.

M learners train at their own speed and never wait. The model is cut into P fragments; with P = H
every global step handles one. A round takes the values of the learners that it admits:

.. math::
   \Delta_{m,p} = \Theta_p - \theta_{m,p}, \qquad
   w_m = c^{tok}_m \frac{c^{tok}_m}{c^{step}_m}, \qquad
   \Theta_p \leftarrow \mathrm{Nesterov}(\Theta_p, \mathrm{RDA}(\Delta, w)), \qquad
   \theta_{m,p} \leftarrow \Theta_p

Every learner that is up receives the fragment and replaces its own, admitted or not, and its counts
start again. What a learner that was not admitted made of the fragment is lost then. One that is
down receives nothing; when it comes back it copies a peer. When rounds open, close and land:
`schedule.learners`.

Read of the source were abstract and introduction, the rest second-hand. Our readings: Delta is
against the round's Theta_p, not the learner's own copy; the landed fragment's Adam moments are
kept; whoever comes back takes its peer's optimizer state, too. Embeddings, which get the plain
mean, are known by their names alone (`optimizers.kind_of`). Outer rates and gamma were not found:
0.7 / 0.9 and 0.8 are those of implementations.

On one mesh speeds and outages are scripted, and time is counted in ticks, so that a run is
deterministic and can be resumed. Between jobs nothing is scripted; the commit records say who was
admitted (`jobs.round_carrier`). The source has a server that may itself be made of several;
here every region holds the anchor and the outer state, which are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optax

from lowcomm_jax.methods.base import Method, published
from lowcomm_jax.params.fragments import Pattern
from lowcomm_jax.refused import tuples
from lowcomm_jax.rules.merge import Merge
from lowcomm_jax.rules.outer import nesterov
from lowcomm_jax.schedule import Admission, Learners
from lowcomm_jax.settings import FROM_1


@published(period=12, overlap=2)
def decoupled_diloco(
    period: int,
    fragments: int | None = None,
    overlap: int = 2,
    quorum: int = 1,
    grace: float = 0.8,
    speeds: Sequence[float] | None = None,
    outages: Sequence[tuple[int, int, int]] = (),
    merge: Merge | str | Mapping[str, Any] | None = "radial_directional",
    weights: str = "token_rate",
    outer: optax.GradientTransformation | None = None,
    codec: Any = None,
    inner_batching: Any = None,
    pattern: Pattern | Sequence[str] = "balanced_tensors",
) -> Method:
    """Train learners that never wait for one another.

    Args:
      period: H, inner steps of the fastest learner between rounds of a fragment.
      fragments: P <= H, parts of the model that travel one at a time; None = H, one fragment a
        step, as published.
      overlap: tau < H, ticks from a round's quorum to its landing.
      quorum: K, learners that a round needs, from 1 to the number of regions; all of them =
        everyone is waited for.
      grace: gamma, share of the slack that a round waits for the others, in [0, 1); 0 = a round
        closes at its quorum.
      speeds: inner steps per second of each learner, any unit; None = all equal. On one mesh.
      outages: (region, first tick, last tick) for each time that a learner is down. On one mesh.
      merge: a rule of `lowcomm_jax.merge` or its name. This one (RDA, `merge.RadialDirectional`)
        reads payloads, so that everyone receives all of them. None = the weighted mean, which is
        reduced on the way.
      weights: of learners in a merge: `token_rate`, w of the module, with tokens and steps since
        the learner received the fragment; or `given`, those of the engine.
      outer: Optax transform of the mean pseudo-gradient; default Nesterov 0.7 / 0.9.
      codec: wire codec; None = dense fp32.
      inner_batching: as in `diloco`.
      pattern: how the parameters are cut: `sequential`, `strided`, `balanced`, `balanced_tensors`,
        or P regular expressions (`params.fragments.partition`).
    """
    steps = period if FROM_1.fits(period) else 1  # else the schedule says so
    return Method(
        name="decoupled_diloco",
        schedule=Learners(
            period,
            steps if fragments is None else fragments,
            overlap,
            Admission(quorum, grace, weights),
            () if speeds is None else tuples(speeds),
            tuples(outages),
        ),
        outer=nesterov(0.7, 0.9) if outer is None else outer,
        codec=codec,
        inner_batching=inner_batching,
        pattern=pattern,
        merge=merge,
    )
