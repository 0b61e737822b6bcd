"""Training with growing batches and several trainers that merge (AdLoCo, arXiv 2508.18182).

A round is the H inner steps between two exchanges. Before it trainers may merge; at its first step
every trainer's gradient noise is measured where all its regions stand on the anchor, and the batch
policy decides from it how large the batch of the *next* round is. The decision is fetched while
this round's steps already run, so nothing waits for it.

Differs from the paper's code: statistics come from a common point instead of the last gradients of
drifted replicas; the inner moments are kept across rounds; above the cap gradients accumulate, so
that memory is bounded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import optax

from lowcomm_jax.adaptive import checks
from lowcomm_jax.adaptive.history import AdaptiveHistory, Segment, Share, TrainerEvent
from lowcomm_jax.adaptive.merging import Merge, Merger
from lowcomm_jax.adaptive.pace import SCALINGS, Scaling, Schedule, factor_at, paced, set_pace
from lowcomm_jax.adaptive.state import AdaptiveState, Trainer
from lowcomm_jax.engine import Engine
from lowcomm_jax.finish import finish
from lowcomm_jax.methods.base import Method
from lowcomm_jax.network import drive, follow
from lowcomm_jax.views import global_params

PyTree = Any
Participants = Callable[[int], Sequence[bool] | None] | None
Source = Callable[[int, int, int], PyTree]


class Plan(NamedTuple):
    samples: int
    microbatch: int
    accumulate: int


class AdaptiveEngine:
    """Trains one model with a method that adapts its batches or has several trainers.

    Every trainer is an ordinary `TrainState` of one ordinary `Engine`, `engine`: on one device
    trainers run one after the other, share every compiled program, may ask for different batches,
    and free their memory as soon as they are merged. The random numbers of a step are the same for
    all of them.

    Args:
      loss_fn, inner, regions, seed: see `Engine`. The learning rate of `inner` is the peak.
      method: with `inner_batching` (a batch policy), `trainers`, or both.
      network: see `Engine`; its seconds of a step are those of `reference_batch` samples. All
        trainers of a region compute on one clock and share its links.
      reference_batch: samples per region and step for which the learning rate and the network's
        seconds were chosen; None = the policy's start.
      scaling: of the learning rate with batch / reference_batch: none, sqrt or linear.
      schedule: samples consumed by all trainers of all regions (a traced int32; multiply by the
        tokens of one) -> factor on the learning rate.
      **engine: any other keyword of `Engine`.

    Raises:
      ValueError: one message that lists every setting that cannot work, with its fix.
    """

    def __init__(
        self,
        loss_fn: Callable,
        inner: optax.GradientTransformation,
        method: Method,
        regions: int,
        *,
        network: Any = None,
        seed: int = 0,
        reference_batch: int | None = None,
        scaling: Scaling = "none",
        schedule: Schedule | None = None,
        **engine: Any,
    ):
        problems = checks.problems(method, regions, reference_batch, scaling, engine)
        self.clock, unusable = checks.clock(network, regions, seed)
        plain, found = checks.engine(
            lambda: Engine(
                loss_fn,
                optax.chain(inner, paced(schedule)),
                checks.stripped(method),
                regions,
                seed=seed,
                **engine,
            )
        )
        checks.refuse(problems + unusable + found)
        self.engine, self.method, self.regions = plain, method, plain.regions
        self.policy, self.trainers = checks.settled(method)
        self.period = method.schedule.period
        self.reference_batch = reference_batch or self.policy.start
        self._scale, self._schedule = SCALINGS[scaling], schedule
        self._merger = Merger(self.trainers.moments)

    # -- state --------------------------------------------------------------------------------

    def init(self, params: PyTree) -> AdaptiveState:
        """Start every trainer in every region from `params` (see `Engine.init`)."""
        start, none = self.policy.start, np.zeros(self.regions.count, np.int64)
        trainers = {
            number: Trainer(self.engine.init(params), start, start, 0, self.policy.init())
            for number in range(self.trainers.count)
        }
        return AdaptiveState(trainers, 0, none, none.copy())

    def run(
        self,
        state: AdaptiveState,
        source: Source,
        *,
        rounds: int | None = None,
        steps: int | None = None,
        samples: int | None = None,
        participants: Participants = None,
        evaluate: Callable[[PyTree], float] | None = None,
    ) -> tuple[AdaptiveState, AdaptiveHistory]:
        """Train for one of: so many rounds, inner steps, or samples of all trainers and regions.

        A run may end anywhere in a round and go on there. Of a number of samples (tokens are
        samples times the tokens of one) the last step is a whole one.

        Args:
          state: is donated; use the returned one.
          source: `(trainer, start, count)` -> host leaves `[R, count, ...]`, samples
            [start, start + count) of the streams (region, trainer): a pure function.
          participants: see `Engine.run`; of all trainers alike.
          evaluate: loss of parameters, before and after every merge; needed for a `hurt_bound`.

        Raises:
          ValueError: not one number, or a `hurt_bound` without `evaluate`.
        """
        goal = checks.goal(state, self.period, rounds, steps, samples)
        if evaluate is None and self.trainers.hurt_bound is not None:
            raise ValueError("hurt_bound bounds the rise of a loss: give run(evaluate=)")
        record = AdaptiveHistory()
        while not goal.reached(state):
            state, segment = self._segment(state, source, goal, participants, evaluate)
            record.segments.append(segment)
            self._book(segment)
        return state, record

    def _segment(self, state, source, goal, participants, evaluate):
        """Steps up to the end of the round or the goal; returns (state, segment)."""
        opening, merges, looks = state.step % self.period == 0, [], {}
        if opening:
            state, merges = self._open(state, evaluate)
        plans = {number: self._plan(t.batch) for number, t in state.trainers.items()}
        per_step = self.regions.count * sum(plan.samples for plan in plans.values())
        start, n, shares, probed = state.step, goal.steps(state, per_step, self.period), {}, 0
        for number, plan in plans.items():
            trainer = state.trainers[number]
            scale = self._scale(plan.samples / self.reference_batch)
            ready = set_pace(trainer.state, state.samples, per_step, scale)
            first = trainer.used
            batches = (source(number, first + k * plan.samples, plan.samples) for k in range(n))
            ended, history = self.engine.run(ready, batches, participants)
            trainer = trainer.replace(state=ended, used=first + n * plan.samples)
            rate_S = factor_at(self._schedule, state.samples + per_step * np.arange(n), scale)
            shares[number] = Share(history, trainer.batch, *plan, np.broadcast_to(rate_S, n))
            state = state.with_trainer(number, trainer)
        work_S = np.full(n, sum(plan.samples for plan in plans.values()), float)
        work_S[0] += probed
        segment = Segment(start, n, shares, work_S / self.reference_batch, merges, looks)
        return state.replace(samples=state.samples + n * per_step), segment

    # -- between rounds -----------------------------------------------------------------------

    def _open(self, state: AdaptiveState, evaluate) -> tuple[AdaptiveState, list[Merge]]:
        """Merge if it is time; every trainer's request becomes its batch."""
        round_, merges = state.step // self.period, []
        if self.trainers.merges_at(round_, len(state.trainers)):
            state, merge = self._merge(state, round_, evaluate)
            merges.append(merge)
        trainers = {i: t.replace(batch=t.request) for i, t in state.trainers.items()}
        return state.replace(trainers=trainers), merges

    def _merge(self, state: AdaptiveState, round_: int, evaluate) -> tuple[AdaptiveState, Merge]:
        requests = {i: t.request for i, t in state.trainers.items()}
        survivor, retired = self.trainers.pair(requests)
        merged = self._merged(state, survivor, retired)
        merge = Merge(round_, survivor, retired, (requests[survivor], requests[retired]))
        if evaluate is not None:
            pair = [state.trainers[i].state for i in (survivor, retired)]
            before = tuple(float(evaluate(global_params(one))) for one in pair)
            after = float(evaluate(global_params(merged.state)))
            merge = dataclasses.replace(merge, before=before, after=after)
            bound = self.trainers.hurt_bound
            if bound is not None and not merge.rise <= bound:
                return state, dataclasses.replace(merge, accepted=False)
        return _retire(state, survivor, retired, merged), merge

    def _merged(self, state: AdaptiveState, survivor: int, retired: int) -> Trainer:
        kept, gone = state.trainers[survivor], state.trainers[retired]
        share = gone.request / (kept.request + gone.request)
        programs = self.engine.trips(kept.state).programs
        return kept.replace(state=self._merger(programs, kept.state, gone.state, share))

    def finish(self, state: AdaptiveState) -> AdaptiveState:
        """Drain, synchronise every trainer once more (`finish.finish`), and merge all into one."""
        events = []
        for number, trainer in state.trainers.items():
            ended, found = finish(self.engine.trips(trainer.state), trainer.state)
            state = state.with_trainer(number, trainer.replace(state=ended))
            events += [TrainerEvent.of(event, number) for event in found]
        if self.clock is not None:
            follow(self.clock, state.step, events)
        while len(state.trainers) > 1:
            requests = {i: t.request for i, t in state.trainers.items()}
            survivor, retired = self.trainers.pair(requests)
            weight = requests[survivor] + requests[retired]
            merged = self._merged(state, survivor, retired).replace(request=weight)
            state = _retire(state, survivor, retired, merged)
        return state

    def _plan(self, batch):
        return Plan(batch, batch, 1)

    # -- virtual time -------------------------------------------------------------------------

    def _book(self, segment: Segment) -> None:
        """Let the virtual clock run through a segment: one clock for all trainers of a region."""
        if self.clock is None:
            return
        for i, work in enumerate(segment.work_S):
            step = segment.start + i + 1
            drive(self.clock, step, segment.events(step), work=work)


def _retire(state: AdaptiveState, survivor: int, retired: int, merged: Trainer) -> AdaptiveState:
    """Put the merged trainer in the survivor's place and let the other one go."""
    gone = state.trainers[retired].state.clock
    trainers = {**state.trainers, survivor: merged}
    del trainers[retired]
    return state.replace(
        trainers=trainers,
        retired_sent=state.retired_sent + gone.bytes_sent,
        retired_received=state.retired_received + gone.bytes_received,
    )
