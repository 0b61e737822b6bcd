"""CoCoDC (arXiv 2504.17672): delay compensation and adaptive transmission.

Every floor(H / N) steps one fragment may be sent, the one that changes most (`schedule.Adaptive`).
It lands tau steps later, as in `streaming_diloco`, by `landing.taylor_delay_correction`.

Differs from the paper: we had not its body; the rules follow the first author's code. How a
fragment is chosen differs as `schedule.adaptive` says. Each landing uses its real staleness.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import optax

from lowcomm_jax.methods.base import Method, timing_problems
from lowcomm_jax.methods.streaming_diloco import streaming_diloco
from lowcomm_jax.params.fragments import Pattern
from lowcomm_jax.refused import collect, is_number
from lowcomm_jax.rules.landing import taylor_delay_correction
from lowcomm_jax.schedule import Adaptive
from lowcomm_jax.schedule import syncs_per_period as slots
from lowcomm_jax.settings import FROM_1


def cocodc(
    period: int,
    fragments: int,
    overlap: int | tuple[int, ...],
    syncs_per_period: int | None = None,
    gamma: float | None = None,
    taylor: float | optax.GradientTransformation = 0.5,
    outer: optax.GradientTransformation | None = None,
    codec: Any = None,
    inner_batching: Any = None,
    pattern: Pattern | Sequence[str] = "strided",
    rest: Literal["own", "dealt"] = "dealt",
    step_seconds: float | None = None,
    sync_seconds: float | None = None,
    measured: bool = False,
    score: Literal["rate", "drift"] = "rate",
) -> Method:
    """Send what changes most, and repair the delay at the landing.

    Args:
      period: H, inner steps after which an unsent fragment is overdue.
      fragments: K <= H, parts that travel one at a time.
      overlap: tau < H, inner steps from send to landing; one for all regions, or one each.
      syncs_per_period: N, sends in H steps. None = K; with `gamma` as many as fit into that share
        of the link (`schedule.syncs_per_period`).
      gamma: share of the link that may be used, in (0, 1]; None = N decides.
      step_seconds: T_c, seconds of an inner step, with `sync_seconds`; None = the network's.
      sync_seconds: T_s, seconds to synchronise a fragment; None = the network's.
      measured: measure T_c and T_s in the run instead. N is then K at first; every change counts
        from the next period on.
      score: what a fragment is chosen by: `rate`, its change per step at its last landing; or
        `drift`, the regions' mean distance from the anchor, per step (`schedule.adaptive`).
      taylor: lambda, strength of the correction at a landing, 0 = none; or a landing transform
        (`landing.taylor_delay_correction`).
      outer: Optax transform of the mean pseudo-gradient; default Nesterov 0.4 / 0.9.
      pattern, rest: as in `streaming_diloco`.
      codec, inner_batching: as in `diloco`.
    """
    timing = (gamma, step_seconds, sync_seconds)
    problems = _syncs_problems(syncs_per_period, *timing, measured)
    problems += timing_problems(step_seconds, sync_seconds)
    counted = FROM_1.fits(period) and FROM_1.fits(fragments)  # else the schedule says so
    syncs = syncs_per_period
    if syncs is None:
        syncs = fragments if FROM_1.fits(fragments) else 1
    if gamma is not None and not measured and not problems and counted:
        # Without T_c and T_s the network settles N.
        syncs = None if step_seconds is None else slots(period, fragments, *timing)
    landing = None
    if isinstance(taylor, optax.GradientTransformation):
        landing = taylor
    elif is_number(taylor):
        strength = float(taylor)
        landing = collect(
            problems, "taylor: ", lambda: taylor_delay_correction(strength, mode="fixed")
        )
    else:
        problems.append(f"taylor={taylor!r}: give lambda (0 = no term) or a landing transform")
    even = streaming_diloco(
        period, fragments, overlap, 0.0, pattern, outer, codec, inner_batching, rest
    )
    schedule = Adaptive(period, fragments, syncs, overlap, score, gamma, measured)
    return even.named("cocodc", problems, schedule=schedule, landing=landing)


def _syncs_problems(syncs, gamma, step_seconds, sync_seconds, measured: bool) -> list[str]:
    """Which of the settings of N contradict one another."""
    given = [x for x in (step_seconds, sync_seconds) if x is not None]
    problems = []
    if syncs is not None and (gamma is not None or given or measured):
        problems.append(
            "syncs_per_period is given, so gamma, step_seconds, sync_seconds and measured are "
            "unused: remove one or the other"
        )
    elif gamma is None and (given or measured):
        problems.append(
            "gamma is missing: step_seconds, sync_seconds and measured have no effect without it; "
            "give it, or leave them out"
        )
    if given and measured:
        problems.append("T_c and T_s are given and measured: remove one or the other")
    if gamma is not None and not (is_number(gamma) and 0 < gamma <= 1):
        problems.append(f"gamma={gamma!r}: give a share of the link in (0, 1]")
    return problems
