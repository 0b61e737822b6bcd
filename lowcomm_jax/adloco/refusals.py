"""Refusals of an `AdaptiveEngine`'s own settings, one line with its fix each."""

from __future__ import annotations

from typing import Any

from lowcomm_jax.adloco.learning_rate import SCALINGS
from lowcomm_jax.refusals import Row
from lowcomm_jax.rules.batching import BatchPolicy
from lowcomm_jax.setup import FROM_1, Setup, Takes

COUNT = Takes(lambda x: x is None or FROM_1.fits(x), FROM_1.fix)
SCALING = Takes(lambda x: isinstance(x, str) and x in SCALINGS, f"use {', '.join(SCALINGS)}")


def rows(
    largest_microbatch: Any = None,
    memory: Any = None,
    reference_batch: Any = None,
    scaling: Any = "none",
) -> tuple[Row, ...]:
    """Rows for `refusals.problems`; arguments as in `AdaptiveEngine`.

    A row's condition gives the line, since a text of what was given is no template.
    """
    own = {
        "largest_microbatch": (COUNT, largest_microbatch),
        "memory": (COUNT, memory),
        "reference_batch": (COUNT, reference_batch),
        "scaling": (SCALING, scaling),
    }
    both = largest_microbatch is not None and memory is not None

    def unusable(name: str) -> Row:
        takes, value = own[name]
        line = takes.problem(name, value)
        return Row(name, lambda s: line)

    def unplannable(s: Setup) -> str | None:
        policy = s.method.inner_batching
        if both or not isinstance(policy, BatchPolicy) or policy.violations(s.regions):
            return None
        if policy.cap is None:
            return "cap=None: batches are staged in a buffer of fixed size; give the largest batch"
        largest = min(largest_microbatch or policy.cap, policy.cap)
        if largest >= policy.start:
            return None
        what = f"the memory cap of {largest} samples is below the start batch of {policy.start}"
        return f"{what}: start with {largest}, or give more memory"

    return (
        *map(unusable, own),
        Row(
            "memory largest_microbatch",
            lambda s: both and f"memory={memory}: give it, or largest_microbatch, but not both",
        ),
        Row("adaptive method regions largest_microbatch memory", unplannable),
        Row(
            "memory method exchange",
            lambda s: (
                s.separate
                and memory is not None
                and f"memory={memory}: regions between jobs could plan different batches; give "
                "largest_microbatch, the same for all"
            ),
        ),
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
