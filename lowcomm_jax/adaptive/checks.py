"""Refusals of an adaptive engine before any work starts, one line with its fix each."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from lowcomm_jax.adaptive.lr_scaling import SCALINGS
from lowcomm_jax.adaptive.state import AdaptiveState
from lowcomm_jax.batching import BatchPolicy, Switch
from lowcomm_jax.batching.trainers import Trainers
from lowcomm_jax.methods.base import Method
from lowcomm_jax.refusals import Row
from lowcomm_jax.setup import FROM_1, Setup


def policy_and_trainers(method: Method) -> tuple[Any, Trainers]:
    """The method's batch policy, and its trainers: one that never merges, where it names none."""
    return method.inner_batching, method.trainers or Trainers(1, None)


def stripped(method: Method) -> Method:
    """The method without batch policy and trainers, for the ordinary engine of every trainer."""
    return dataclasses.replace(method, inner_batching=None, trainers=None)


def rows(
    largest_microbatch: Any = None,
    memory: Any = None,
    reference_batch: Any = None,
    scaling: Any = "none",
) -> tuple[Row, ...]:
    """The refusals of an `AdaptiveEngine`'s own settings (`refusals.problems`).

    A row's condition gives the line, since a text of what was given is no template.
    """
    sizes = {"largest_microbatch": largest_microbatch, "memory": memory}
    counts = {**sizes, "reference_batch": reference_batch}
    both = largest_microbatch is not None and memory is not None

    def miscounted(name: str) -> Row:
        value = counts[name]
        line = None if value is None else FROM_1.problem(name, value)
        return Row(name, lambda s: line)

    def unplannable(s: Setup) -> list[str]:
        policy, trainers = policy_and_trainers(s.method)
        if both or not isinstance(policy, BatchPolicy) or policy.violations(s.regions):
            return []
        if policy.cap is None:
            fix = "give the largest batch"
            return [f"cap=None: batches are staged in a buffer of fixed size; {fix}"]
        largest = min(largest_microbatch or policy.cap, policy.cap)
        return Switch(largest, policy.start, trainers.threshold).violations()

    return (
        *map(miscounted, counts),
        Row(
            "memory largest_microbatch",
            lambda s: both and f"memory={memory}: give it, or largest_microbatch, but not both",
        ),
        Row("adaptive method regions largest_microbatch memory", unplannable),
        Row(
            "scaling",
            lambda s: (
                not (isinstance(scaling, str) and scaling in SCALINGS)
                and f"scaling={scaling!r}: use {', '.join(SCALINGS)}"
            ),
        ),
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


@dataclasses.dataclass(frozen=True)
class Goal:
    """Where a run ends: at a step, or at the first one by which `samples` were consumed."""

    step: float
    samples: float

    def reached(self, state: AdaptiveState) -> bool:
        return state.step >= self.step or state.samples >= self.samples

    def steps(self, state: AdaptiveState, per_step: int, period: int) -> int:
        """Inner steps from here to the end of the round, or to the goal if that comes first."""
        left = period - state.step % period, self.step - state.step
        if self.samples == math.inf:
            return int(min(left))
        return int(min(*left, math.ceil((self.samples - state.samples) / per_step)))


def goal(
    state: AdaptiveState, period: int, rounds: int | None, steps: int | None, samples: int | None
) -> Goal:
    """Where a run of a number of rounds, steps or samples from here ends: at the first of them.

    Raises:
      ValueError: none is given, or one is no whole number from 0.
    """
    given = {"rounds": rounds, "steps": steps, "samples": samples}
    named = {name: value for name, value in given.items() if value is not None}
    if not named:
        raise ValueError(f"say how long to run: {', '.join(given)}")
    for name, value in named.items():
        if not isinstance(value, int | np.integer) or value < 0:
            raise ValueError(f"{name}={value!r}: a whole number from 0 is needed")
    last = math.inf if steps is None else state.step + steps
    if rounds is not None:
        last = min(last, (state.step // period + rounds) * period)
    return Goal(last, math.inf if samples is None else state.samples + samples)
