"""Training with growing batches and several trainers that merge (AdLoCo, arXiv 2508.18182).

A round is the H inner steps between two exchanges. Before a round trainers may merge. At its first
step the engine measures every trainer's gradient noise, where all its regions hold the anchor's
values. From the noise the batch policy decides how large the batch of the *next* round is. The
engine fetches the decision while this round's steps already run, so that no step waits for it.
Where every region is a job, the numbers come with the round's payloads, and it decides at the end
(`job_trainers`).

Differs from the paper's code: statistics come from a common point instead of the last gradients of
drifted replicas. Inner moments are kept across rounds. Above the cap gradients accumulate, so that
memory is bounded.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import optax

from lowcomm_jax.adloco.history import AdaptiveHistory, Segment, TrainerEvent, in_order
from lowcomm_jax.adloco.job_trainers import JobTrainers
from lowcomm_jax.adloco.learning_rate import (
    SCALINGS,
    LrSchedule,
    Scaling,
    factors,
    scale_lr,
    set_lr_scale,
)
from lowcomm_jax.adloco.merge import (
    Evaluate,
    TriedMerge,
    merge,
    merge_all,
    merge_before_round,
)
from lowcomm_jax.adloco.probe import Measurement, Probe
from lowcomm_jax.adloco.refusals import rows
from lowcomm_jax.adloco.state import AdaptiveState, Trainer
from lowcomm_jax.adloco.step_plan import Plan, Switch, device_bytes, find_cap, step_bytes
from lowcomm_jax.engine import Engine, Participants
from lowcomm_jax.mesh.regions import Regions
from lowcomm_jax.methods.base import Method
from lowcomm_jax.network import VirtualClock, drive, follow
from lowcomm_jax.refusals import TITLE, microbatch_problems, refuse_setup
from lowcomm_jax.refused import is_whole, refuse
from lowcomm_jax.rules.batching import BatchPolicy
from lowcomm_jax.rules.trainers import Trainers
from lowcomm_jax.runtime.job_delivery import JobDelivery
from lowcomm_jax.setup import Setup, refuse_unknown
from lowcomm_jax.state.train_state import TrainState
from lowcomm_jax.sync.finish import finish
from lowcomm_jax.sync.round_programs import RoundPrograms
from lowcomm_jax.sync.sync_loop import EventLoop
from lowcomm_jax.train.batch_blocks import MicrobatchCut

PyTree = Any
Source = Callable[[int, Any, int], PyTree]
Look = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Goal:
    """Where a run ends: at a step, or at the first one by which `samples` were consumed."""

    step: float
    samples: float = math.inf

    @classmethod
    def of(cls, state: AdaptiveState, period: int, **given: int | None) -> Goal:
        """So many `rounds`, `steps` or `samples` from here: the first of them that is reached.

        Raises:
          ValueError: none is given, or one is no whole number from 0.
        """
        named = {name: value for name, value in given.items() if value is not None}
        if not named:
            raise ValueError(f"say how long to run: {', '.join(given)}")
        for name, value in named.items():
            if not (is_whole(value) and value >= 0):
                raise ValueError(f"{name}={value!r}: a whole number from 0 is needed")
        last = state.step + named.get("steps", math.inf)
        if "rounds" in named:
            last = min(last, (state.step // period + named["rounds"]) * period)
        return cls(last, state.samples + named.get("samples", math.inf))

    def reached(self, state: AdaptiveState) -> bool:
        return state.step >= self.step or state.samples >= self.samples

    def steps(self, state: AdaptiveState, per_step: int, period: int) -> int:
        """Inner steps from here to the end of the round, or to the goal if that comes first."""
        left = min(period - state.step % period, self.step - state.step)
        samples = self.samples - state.samples
        return int(left if samples == math.inf else min(left, math.ceil(samples / per_step)))


class AdaptiveEngine:
    """Trains one model with a method that adapts its batches or has several trainers.

    Every trainer is an ordinary `TrainState` of one ordinary `Engine`, `plain`. One trainer makes
    the steps of a segment after the other. Trainers may ask for different batches, and free their
    memory as soon as they are merged. The random numbers of a step are the same for all of them.

    Args:
      loss_fn, inner, regions, seed: see `Engine`. The learning rate of `inner` is the peak.
      method: with `inner_batching` (a batch policy), `trainers`, or both.
      network: see `Engine`; its seconds of a step are those of `reference_batch` samples. All
        trainers of a region share its virtual time and its links.
      largest_microbatch: most samples of a microbatch; None = as many as `memory` allows, or, if
        that is None too, as the policy's largest batch.
      memory: bytes of a device that a step may use, by the compiler's analysis of it.
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
        largest_microbatch: int | None = None,
        memory: int | None = None,
        reference_batch: int | None = None,
        scaling: Scaling = "none",
        schedule: LrSchedule | None = None,
        **engine: Any,
    ):
        refuse_unknown(engine)
        setup = Setup(loss_fn, inner, method, regions, network=network, seed=seed, **engine)
        refuse_setup(setup, rows(largest_microbatch, memory, reference_batch, scaling))
        single = dataclasses.replace(
            setup,
            inner=optax.chain(inner, scale_lr(schedule)),
            method=dataclasses.replace(method, inner_batching=None, trainers=None),
            network=None,
        )
        plain = Engine.of(single)
        self.plain: Engine = plain
        self.method: Method = method
        self.regions: Regions = plain.regions
        self.policy: BatchPolicy = method.inner_batching
        self.trainers: Trainers = method.trainers or Trainers(1, None)
        self.period: int = method.schedule.period
        self.reference_batch: int = reference_batch or self.policy.start
        self.jobs: JobTrainers | None = None
        if plain.delivery is not None:
            self.jobs = JobTrainers(plain, self.trainers.count)
        self.clock: VirtualClock | None = None
        if setup.links is not None and self.jobs is None:
            self.clock = VirtualClock(setup.links, seed=seed, record=True)
        self.probe: Probe | None = None
        if self.policy.microbatches:
            self.probe = Probe(plain, self.policy.microbatches, self.policy.scope)
        self._total, self._here = setup.regions, plain.runner.here
        self._scale = SCALINGS[scaling]
        self._factors = functools.partial(factors, schedule, self.period)
        self._memory, self._block, self._begun = memory, plain.block, False
        self._plan_for(largest_microbatch or self.policy.cap)
        refuse(TITLE, microbatch_problems(single, self.switch.buckets()))

    def _plan_for(self, largest_microbatch: int) -> None:
        """Plan for a largest microbatch; the staged buffer must hold the longest step."""
        policy, threshold = self.policy, self.trainers.threshold
        cap = min(largest_microbatch, policy.cap)
        self.switch: Switch = Switch(cap, policy.start, threshold, policy.shares, self._total)
        self.plain.block = max(self._block, self.switch.most(policy.cap))

    def init(self, params: PyTree) -> AdaptiveState:
        """Start every trainer in every region from `params` (see `Engine.init`)."""
        start, unused = self.policy.start, np.zeros(self._total, np.int64)
        trainers = {
            number: Trainer(self.plain.init(params), start, start, unused, self.policy.init())
            for number in range(self.trainers.count)
        }
        return AdaptiveState(trainers, 0)

    # -- training -------------------------------------------------------------------------------

    def run(
        self,
        state: AdaptiveState,
        source: Source,
        *,
        rounds: int | None = None,
        steps: int | None = None,
        samples: int | None = None,
        participants: Participants = None,
        evaluate: Evaluate = None,
    ) -> tuple[AdaptiveState, AdaptiveHistory]:
        """Train for a number of rounds, of inner steps, or of samples of all trainers and regions.

        Of several given, the first that is reached ends it. A run may end anywhere in a round and
        go on there. With `samples` (tokens divided by the tokens of a sample) the last step is a
        whole one.

        Args:
          state: is donated; use the returned one.
          source: `(trainer, start, count)` -> host leaves `[R, count, ...]`, samples
            [start, start + count) of the streams (region, trainer): a pure function. `start` is
            one number, or, where the policy has `shares`, int64 `[R]`. R are this job's regions.
          participants: see `Engine.run`; of all trainers alike.
          evaluate: loss of parameters, before and after every merge; needed for a `hurt_bound`.

        Raises:
          ValueError: no number, a `hurt_bound` without `evaluate`, or a state that was donated
            before.
        """
        state.refuse_donated()
        goal = Goal.of(state, self.period, rounds=rounds, steps=steps, samples=samples)
        if evaluate is None and self.trainers.hurt_bound is not None:
            raise ValueError("hurt_bound bounds the rise of a loss: give run(evaluate=)")
        state = self.warm(state, source)
        history = AdaptiveHistory()
        while not goal.reached(state):
            if self.jobs is not None and (missed := self.jobs.rounds_missed(state, self.period)):
                state = self._caught_up(state, source, goal, missed)
                continue
            state, segment = self._segment(state, source, goal, participants, evaluate)
            history.segments.append(segment)
            if self.clock is not None:  # one for all trainers of a region
                for step, work_R in enumerate(segment.work_SxR, segment.start + 1):
                    drive(self.clock, step, segment.events_of(step), work=work_R)
        return state, history

    def _segment(
        self,
        state: AdaptiveState,
        source: Source,
        goal: Goal,
        participants: Participants = None,
        evaluate: Evaluate = None,
        lands_only: bool = False,
    ) -> tuple[AdaptiveState, Segment]:
        """Steps up to the end of the round or the goal, by one trainer after the other.

        Args:
          lands_only: this region makes no steps, and only lands what other jobs land.
        """
        start, merges = state.step, []
        if opens := start % self.period == 0:
            state, merges = self._opened(state, evaluate)
        plans = {number: self.switch.plan(t.batch) for number, t in state.trainers.items()}
        per_step = sum(plan.total for plan in plans.values())
        steps = goal.steps(state, per_step, self.period)
        ends = (start + steps) % self.period == 0
        mask_R = participants and participants((start // self.period + 1) * self.period)
        mask_R = None if mask_R is None else np.asarray(mask_R)[self._here]
        measures = self.probe is not None and (mask_R is None or bool(np.any(mask_R)))
        work_SxR = np.tile(sum(plan.samples_R for plan in plans.values()), (steps, 1))
        seen: dict[int, Measurement] = {}
        if opens and measures and not lands_only:
            for number, plan in plans.items():
                seen[number] = self._measure(number, state.trainers[number], plan, source, mask_R)
                work_SxR[0] += self.probe.samples(seen[number].samples)
        ran, rates = {}, {}
        for number, plan in plans.items():
            trainer = state.trainers[number]
            scale = self._scale(plan.mean / self.reference_batch)
            rate = state.samples, per_step, scale
            rates[number] = functools.partial(self._factors, *rate, steps)
            if self.jobs is not None:
                self.jobs.sends_with(number, trainer, seen.get(number))
            loop = self.loop_of(number, trainer.state)
            if lands_only:
                ran[number] = JobTrainers.passed(loop, trainer.state, steps)
                continue
            ready = set_lr_scale(trainer.state, *rate)
            batches = self._batches(source, number, trainer.used_R, plan, steps)
            cut = MicrobatchCut(plan.microbatch, plan.of(self._here).counts_R)
            ran[number] = self.plain.run_on(loop, ready, batches, participants, cut)
        if self.jobs is not None:
            ran = self.jobs.landed(ran)
        histories = {number: history for number, (_, history) in ran.items()}
        events = {number: history.events for number, history in histories.items()}
        looks: dict[int, Look] = {}
        at_once = self.policy.scope == "across"  # a round's first step waits for what it measures
        for number, (ended, _) in ran.items():
            trainer, plan = state.trainers[number], plans[number]
            if measures and self.jobs is None and (opens if at_once else ends):
                step = start + (1 if at_once else steps)
                ended, sent = self.probe.booked(ended, step, mask_R)
                events[number] = [*sent, *events[number]]
            used_R = trainer.used_R + steps * plan.samples_R
            trainer = trainer.replace(state=ended, used_R=used_R)
            trainer, look = self._decided(number, trainer, seen.get(number), plan, ends)
            looks |= {} if look is None else {number: look}
            state = state.with_trainer(number, trainer)
        state = state.replace(samples=state.samples + steps * per_step)
        if self.jobs is not None and ends and not lands_only:
            self.jobs.tell(state)
        work_SxR = work_SxR[:, self._here] / self.reference_batch
        ran_with = histories, plans, rates, in_order(events)
        return state, Segment(start, steps, *ran_with, work_SxR, merges, looks)

    def _opened(
        self, state: AdaptiveState, evaluate: Evaluate
    ) -> tuple[AdaptiveState, list[TriedMerge]]:
        """The trainers at the start of a round: merged, if it is time, with what they asked for."""
        given = self.trainers, self._programs(state), state, state.step // self.period
        state, merges = merge_before_round(*given, evaluate)
        trainers = {i: t.replace(batch=t.request) for i, t in state.trainers.items()}
        return state.replace(trainers=trainers), merges

    def _measured_size(self, plan: Plan) -> int:
        """Samples of a measured microbatch: all of them together are about one step's."""
        sizes = self.switch.buckets()
        return max([m for m in sizes if m * self.probe.count <= plan.read], default=sizes[0])

    def _measure(
        self, number: int, trainer: Trainer, plan: Plan, source: Source, mask_R: np.ndarray | None
    ) -> Measurement:
        """Start to measure a trainer's gradient noise, on the round's first samples."""
        size = self._measured_size(plan)
        batch = self._draw(source, number, trainer.used_R, size * self.probe.count)
        return self.probe.measure(trainer.state, batch, size, mask_R)

    def _decided(
        self, number: int, trainer: Trainer, seen: Measurement | None, plan: Plan, ends: bool
    ) -> tuple[Trainer, Look | None]:
        """Let the policy decide on a trainer's next request, once the numbers are known.

        Args:
          seen: what was measured before these steps, if anything was.
          ends: whether the round ends with them.

        Returns:
          (trainer, the numbers that the decision rests on; None where nothing was decided).
        """
        found = None if seen is None or self.jobs is not None else seen.statistics()
        if self.jobs is not None:
            trainer = trainer.replace(measured=None if ends else self.jobs.own(number, trainer))
            if ends and self.probe is not None:
                found = self.jobs.heard(number, trainer, self.probe, self._measured_size(plan))
        if found is None or not found.has_variance:
            return trainer, None
        memory, request = self.policy.decide(trainer.policy, found, trainer.batch)
        look = {
            "request": request,
            "signal": found.signal,
            "gbar2": found.gbar2,
            "variance_along": found.variance_along,
            "variance_across": found.variance_across,
        }
        return trainer.replace(policy=memory, request=request), look

    def _batches(self, source: Source, number: int, used_R: np.ndarray, plan: Plan, steps: int):
        read = plan.of(self._here).read
        for k in range(steps):
            yield self._draw(source, number, used_R + k * plan.samples_R, read)

    def _draw(self, source: Source, number: int, start_R: np.ndarray, count: int) -> PyTree:
        even = self.policy.shares is None
        return source(number, int(start_R[0]) if even else start_R[self._here], count)

    def finish(self, state: AdaptiveState) -> AdaptiveState:
        """Drain, synchronise every trainer once more (`finish.finish`), and merge all into one.

        Raises:
          ValueError: the state was donated before.
        """
        state.refuse_donated()
        events, within = [], state.step % self.period > 0
        for number, trainer in state.trainers.items():
            if self.jobs is not None:
                self.jobs.sends_with(number, trainer, None)
            loop = self.loop_of(number, trainer.state)
            ended, found = finish(loop, trainer.state)
            events += [TrainerEvent.of(event, number) for event in found]
            trainer = trainer.replace(state=ended)
            if within:  # between jobs the decision of this round comes with its last payload
                plan = self.switch.plan(trainer.batch)
                trainer, _ = self._decided(number, trainer, None, plan, True)
            state = state.with_trainer(number, trainer)
        if self.clock is not None:
            follow(self.clock, state.step, events)
        state = merge_all(self.trainers, self._programs(state), state)
        if self.jobs is not None:
            self.jobs.compare_at_the_end(state)
            self.jobs.tell(state)
        return state

    # -- compiling ------------------------------------------------------------------------------

    def warm(self, state: AdaptiveState, source: Source) -> AdaptiveState:
        """Compile, once, everything that growing batches and merges need.

        Args:
          state: is donated; use the returned one, which holds the same values.
          source: see `run`; nothing is trained on.
        """
        if self._begun:
            return state
        number, trainer = next(iter(state.trainers.items()))
        example = source(number, 0, 1)
        if self._memory is not None:
            given = self._memory, self.policy.start, self.policy.cap
            self._plan_for(find_cap(self._bytes(state, example), *given))
        self._factors(0, 0, 1.0, 1)
        if self.probe is not None:
            self.probe.warm(trainer.state, example, self.switch.buckets())
        if self.trainers.merge_every is not None and len(state.trainers) > 1:
            merge(self.trainers, self._programs(state), state, *self.trainers.pair(state.requests))
        warm = self.plain.warm(trainer.state, example, self.switch.buckets())
        self._begun = True
        return state.with_trainer(number, trainer.replace(state=warm))

    def _bytes(self, state: AdaptiveState, example: PyTree) -> Callable[[int], int]:
        """Largest microbatch -> bytes of a device that the trainers of the start need.

        The others wait beside the one that makes its steps.
        """
        one = state.first.state

        def needed(microbatch: int) -> int:
            self._plan_for(microbatch)
            waiting = device_bytes(one.replace(counters=None)) * (self.trainers.count - 1)
            return step_bytes(self.plain, one, example, microbatch) + waiting

        return needed

    def _programs(self, state: AdaptiveState) -> RoundPrograms:
        return self.plain.sync_loop(state.first.state).programs

    # -- loops, and jobs of their own -----------------------------------------------------------

    def loop_of(self, number: int, state: TrainState) -> EventLoop:
        """The loop over events of a trainer; on one mesh all have the same."""
        return self.plain.sync_loop(state) if self.jobs is None else self.jobs.loop(number, state)

    def sync_loop(self, state: AdaptiveState) -> EventLoop:
        """The loop over events of the first trainer; steps are those of all."""
        [number, *_] = state.trainers
        return self.loop_of(number, state.first.state)

    @property
    def delivery(self) -> JobDelivery | None:
        """To the other jobs; see `Engine`."""
        return self.plain.delivery

    def reconnect(self, state: AdaptiveState) -> None:
        """Start the exchanges of a restored state again; see `Engine.reconnect`."""
        if self.jobs is not None:
            self.jobs.reconnect(state)

    def pass_steps(self, state: AdaptiveState, source: Source, goal: Goal) -> AdaptiveState:
        """Let this region only land what the others land, to the end of the round or the goal.

        For a job that is one region of several. Trainers merge, and batches grow, as elsewhere; the
        samples of these steps count as used. The regions' own values stay as they are.
        """
        state, _ = self._segment(self.warm(state, source), source, goal, lands_only=True)
        return state

    def _caught_up(
        self, state: AdaptiveState, source: Source, goal: Goal, missed: int
    ) -> AdaptiveState:
        """Land the rounds that the others went on without this region, and start from the anchors.

        At its own pace it would never come up to them. The goal of the run holds for it, too.
        """
        for _ in range(missed):
            if not goal.reached(state):
                state = self.pass_steps(state, source, goal)
        self.jobs.tell(state)
        return self.jobs.start_from_anchors(state)
