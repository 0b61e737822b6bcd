r"""CoCoDC (arXiv 2504.17672): delay compensation and adaptive transmission.

A fragment is sent when a slot comes (every floor(H / N) steps) and lands tau steps later. With
s the local value at the send, D = Theta' - s and g the mean local direction of the flight:

.. math::
   g = \frac{s - \theta}{\tau}, \qquad
   \hat g = g + \lambda\, g \odot g \odot D, \qquad
   \theta \leftarrow \Theta' - \tau \hat g

====== ============================================ =======================
symbol meaning                                      argument
====== ============================================ =======================
H      inner steps of a period                      `period`
K      fragments                                    `fragments`
tau    inner steps between send and landing         `overlap`
N      sends per period                             `syncs_per_period`
gamma  share of the link that may be used           `gamma`
lambda strength of the Taylor term                  `taylor`
====== ============================================ =======================

Differs from the paper: its body was not at hand, the rules follow the first author's code; the
adaptive choice as in `schedule.adaptive`; the real staleness of each landing is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import optax

from lowcomm_jax import landing as landing_rules
from lowcomm_jax import outer as outer_rules
from lowcomm_jax.fragments import Pattern
from lowcomm_jax.methods.base import Method
from lowcomm_jax.schedule import Adaptive
from lowcomm_jax.schedule import syncs_per_period as slots


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
) -> Method:
    """Send what changes most, and repair the delay at the landing.

    Args:
      period: H; fragments: K <= H; overlap: tau < H.
      syncs_per_period: N. Default K; with `gamma`, `step_seconds` (T_c) and `sync_seconds` (T_s):
        min(H, max(K, floor(gamma H T_c / T_s))).
      taylor: lambda of the fixed mode, or a landing transform
        (`landing.taylor_delay_correction`).
      outer: default Nesterov 0.4 / 0.9.
      codec: wire codec; None = dense fp32.
      inner_batching: batch policy of the inner steps; None = a fixed batch.
      pattern, rest: how the parameters are cut (`fragments.partition`).
    """
    problems, syncs = _syncs(period, fragments, syncs_per_period, gamma, step_seconds, sync_seconds)
    if isinstance(taylor, (int, float)):
        taylor = landing_rules.taylor_delay_correction(float(taylor), mode="fixed")
    rule = outer_rules.nesterov(0.4, 0.9) if outer is None else outer
    return Method(
        name="cocodc",
        schedule=Adaptive(period, fragments, syncs, overlap),
        outer=optax.with_extra_args_support(rule),
        landing=optax.with_extra_args_support(taylor),
        codec=codec,
        inner_batching=inner_batching,
        pattern=pattern,
        rest=rest,
        problems=tuple(problems),
    )


def _syncs(period, fragments, syncs, gamma, step_seconds, sync_seconds) -> tuple[list[str], int]:
    """Settle N, and say which of the settings contradict one another."""
    measured = (gamma, step_seconds, sync_seconds)
    if syncs is not None:
        unused = [x for x in measured if x is not None]
        problem = "syncs_per_period is given, so gamma, step_seconds and sync_seconds are unused"
        return [f"{problem}: remove one or the other"] if unused else [], syncs
    if all(x is None for x in measured):
        return [], fragments
    if any(x is None for x in measured):
        return ["gamma, step_seconds (T_c) and sync_seconds (T_s) go together: give all"], fragments
    problems = []
    if not 0 < gamma <= 1:
        problems.append(f"gamma={gamma}: the share of the link lies in (0, 1]")
    if step_seconds <= 0 or sync_seconds <= 0:
        problems.append("step_seconds and sync_seconds must be positive")
    if problems:
        return problems, fragments
    return [], slots(period, fragments, gamma, step_seconds, sync_seconds)
