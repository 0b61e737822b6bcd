"""Refusals of an adaptive engine before any work starts, one line with its fix each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lowcomm_jax.adaptive.lr_scaling import SCALINGS
from lowcomm_jax.adaptive.state import AdaptiveState
from lowcomm_jax.batching import BatchPolicy, Switch
from lowcomm_jax.batching.trainers import Trainers
from lowcomm_jax.engine import Engine
from lowcomm_jax.methods.base import Method
from lowcomm_jax.sync.checks import counting_problems

TITLE = "these settings cannot work:"


def policy_and_trainers(method: Method) -> tuple[Any, Trainers]:
    """The method's batch policy, and its trainers: one that never merges, where it names none."""
    return method.inner_batching, method.trainers or Trainers(1, None)


def stripped(method: Method) -> Method:
    """The method without batch policy and trainers, for the ordinary engine of every trainer."""
    return dataclasses.replace(method, inner_batching=None, trainers=None)


def problems(
    method: Method,
    regions: int,
    reference_batch: Any,
    scaling: Any,
    engine: Mapping[str, Any],
) -> list[str]:
    """Problems of the adaptive part with these settings, one line with its fix each."""
    found = []
    if method.inner_batching is None:
        fix = "give inner_batching, a policy of lowcomm_jax.batching, or use lc.Engine"
        found.append(f"{method.name} has no batch policy: {fix}")
    found += method.adaptive_violations(regions)
    if method.schedule.needs_network or method.schedule.measured:
        found.append(
            f"{method.name} draws T_c and T_s from a network or measures them, and with a growing "
            "batch T_c is no constant: give its numbers instead"
        )
    if reference_batch is not None:
        found += counting_problems(reference_batch=reference_batch)
    if scaling not in SCALINGS:
        found.append(f"scaling={scaling!r}: use {', '.join(SCALINGS)}")
    if engine.get("accumulate", 1) != 1:
        found.append(
            f"accumulate={engine['accumulate']}: the batch policy decides how batches are cut; "
            "leave it out"
        )
    return found


def size_problems(method: Method, regions: int, largest_microbatch: Any, memory: Any) -> list[str]:
    """Problems of the sizes of microbatches, one line with its fix each."""
    found = []
    if largest_microbatch is not None and memory is not None:
        found.append("largest_microbatch and memory: give one of the two")
    for name, value in (("largest_microbatch", largest_microbatch), ("memory", memory)):
        if value is not None:
            found += counting_problems(**{name: value})
    policy, found_trainers = policy_and_trainers(method)
    if not isinstance(policy, BatchPolicy) or found or policy.violations(regions):
        return found
    if policy.cap is None:
        return ["cap=None: batches are staged in a buffer of fixed size; give the largest batch"]
    largest = largest_microbatch or policy.cap
    return Switch(min(largest, policy.cap), policy.start, found_trainers.threshold).violations()


def engine(make: Callable[[], Engine]) -> tuple[Engine | None, list[str]]:
    """(the ordinary engine or None, the problems that it raises)."""
    try:
        return make(), []
    except ValueError as error:
        return None, str(error).split("\n- ")[1:] or [str(error)]


def refuse(found: list[str]) -> None:
    """Raise one error that lists everything, if there is anything."""
    if found:
        raise ValueError("\n- ".join([TITLE, *dict.fromkeys(found)]))


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
