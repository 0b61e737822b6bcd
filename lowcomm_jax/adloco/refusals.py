"""Refusals of an `AdaptiveEngine`'s own settings, one line with its fix each."""

from __future__ import annotations

from typing import Any

from lowcomm_jax.adloco.learning_rate import SCALINGS
from lowcomm_jax.refusals import Row
from lowcomm_jax.rules.batching import BatchPolicy
from lowcomm_jax.setup import FROM_1, FUNCTION_OR_NONE, Setup, Takes

COUNT = Takes(lambda x: x is None or FROM_1.fits(x), FROM_1.fix)
SCALING = Takes(lambda x: isinstance(x, str) and x in SCALINGS, f"use {', '.join(SCALINGS)}")


def rows(
    largest_microbatch: Any = None,
    reference_batch: Any = None,
    scaling: Any = "none",
    schedule: Any = None,
) -> tuple[Row, ...]:
    """Rows for `refusals.problems`; arguments as in `AdaptiveEngine`.

    A row's condition gives the line, since a text of what was given is no template.
    """
    most = largest_microbatch
    own = {
        "largest_microbatch": COUNT.problem("largest_microbatch", most),
        "reference_batch": COUNT.problem("reference_batch", reference_batch),
        "scaling": SCALING.problem("scaling", scaling),
        "schedule": FUNCTION_OR_NONE.problem("schedule", schedule),
    }

    def below_start(s: Setup) -> str | None:
        policy = s.method.inner_batching
        if most is None or not isinstance(policy, BatchPolicy) or policy.violations():
            return None
        what = f"largest_microbatch={most} is below start={policy.start}"
        return f"{what}: start with {most}, or give more" if most < policy.start else None

    return (
        *(Row(name, lambda s, line=line: line) for name, line in own.items()),
        Row("largest_microbatch method", below_start),
        Row(
            "method",
            lambda s: s.method.inner_batching is None,
            "{m.name} has no batch policy: give inner_batching, a policy of lowcomm_jax.batching, "
            "or use lc.Engine",
        ),
        Row(
            "method",
            lambda s: s.method.schedule.needs_network or s.method.schedule.measured,
            "{m.name} draws T_c and T_s from a network or measures them, and with a growing batch "
            "T_c is no constant: give its numbers instead",
        ),
        Row(
            "accumulate method",
            lambda s: s.accumulate != 1,
            "accumulate={s.accumulate}: the batch policy decides how batches are cut; leave it out",
        ),
    )
