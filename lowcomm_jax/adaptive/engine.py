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

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import optax

from lowcomm_jax.adaptive import checks
from lowcomm_jax.adaptive.history import AdaptiveHistory, Segment, Share, TrainerEvent
from lowcomm_jax.adaptive.job_trainers import JobNoise, JobTrainers
from lowcomm_jax.adaptive.lr_scaling import (
    SCALINGS,
    Factors,
    LrSchedule,
    Scaling,
    scale_lr,
    set_lr_scale,
)
from lowcomm_jax.adaptive.noise_measurement import Measurement, NoiseMeasurement, Probe
from lowcomm_jax.adaptive.state import AdaptiveState, Trainer
from lowcomm_jax.adaptive.step_memory import device_bytes, step_bytes
from lowcomm_jax.adaptive.trainer_merge import TrainerMerge
from lowcomm_jax.batching import BatchPolicy, Plan, Switch, find_cap
from lowcomm_jax.batching.trainers import Trainers
from lowcomm_jax.engine import Engine, Participants
from lowcomm_jax.history import History
from lowcomm_jax.mesh.regions import Regions
from lowcomm_jax.methods.base import Method
from lowcomm_jax.network import VirtualClock, drive, follow
from lowcomm_jax.refusals import TITLE, microbatch_problems, refuse_setup
from lowcomm_jax.refused import refuse
from lowcomm_jax.runtime.job_carrier import start_from_anchor
from lowcomm_jax.runtime.job_delivery import JobDelivery
from lowcomm_jax.runtime.make_loop import reconnect
from lowcomm_jax.setup import Setup, refuse_unknown
from lowcomm_jax.state.train_state import TrainState
from lowcomm_jax.sync.finish import finish
from lowcomm_jax.sync.round_programs import RoundPrograms
from lowcomm_jax.sync.sync_loop import EventLoop
from lowcomm_jax.train.batch_blocks import MicrobatchCut

PyTree = Any
Source = Callable[[int, int, int], PyTree]


class AdaptiveEngine:
    """Trains one model with a method that adapts its batches or has several trainers.

    Every trainer is an ordinary `TrainState` of one ordinary `Engine`, `engine`. One trainer makes
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

    engine: Engine
    method: Method
    regions: Regions
    clock: VirtualClock | None
    policy: BatchPolicy
    trainers: Trainers
    period: int
    reference_batch: int
    trainer_merge: TrainerMerge
    probe: Probe | None
    switch: Switch
    noise: NoiseMeasurement

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
        sizes = largest_microbatch, memory
        policy = checks.rows(*sizes, reference_batch, scaling)
        refuse_setup(setup, policy)
        stepping = optax.chain(inner, scale_lr(schedule))
        own = {"inner": stepping, "method": checks.stripped(method), "network": None}
        plain = Engine(**(setup.as_keywords() | own))
        self.engine, self.method, self.regions = plain, method, plain.regions
        self._total, self._here = setup.regions, plain.runner.here
        self._jobs = None
        if plain.delivery is not None:
            self._jobs = JobTrainers(plain, method.trainer_count)
        self.clock = None
        if setup.links is not None and self._jobs is None:
            self.clock = VirtualClock(setup.links, seed=seed, record=True)
        self.policy, self.trainers = checks.policy_and_trainers(method)
        self.period = method.schedule.period
        self.reference_batch = reference_batch or self.policy.start
        self._scale, self._factors = SCALINGS[scaling], Factors(schedule, self.period)
        self.trainer_merge = TrainerMerge(self.trainers, self.period)
        self.probe = None
        if self.policy.adapts:
            self.probe = Probe(plain, self.policy.microbatches, self.policy.scope)
        self._memory, self._block, self._begun = memory, plain.block, False
        self._loops = _OneLoop(plain) if self._jobs is None else self._jobs
        self._plan_for(largest_microbatch or self.policy.cap)
        refuse(TITLE, microbatch_problems(plain.setup, self.switch.buckets()))

    def _plan_for(self, largest_microbatch: int) -> None:
        """Plan for a largest microbatch; the staged buffer must hold the longest step."""
        cap = min(largest_microbatch, self.policy.cap)
        start, shares = self.policy.start, self.policy.shares
        self.switch = Switch(cap, start, self.trainers.threshold, shares, self._total)
        self.engine.block = max(self._block, self.switch.most(self.policy.cap))
        given = self.policy, self.probe, self.switch.buckets()
        self.noise = NoiseMeasurement(*given)
        if self._jobs is not None:
            self.noise = JobNoise(*given, self._jobs)

    # -- state --------------------------------------------------------------------------------

    def init(self, params: PyTree) -> AdaptiveState:
        """Start every trainer in every region from `params` (see `Engine.init`)."""
        start, none = self.policy.start, np.zeros(self.regions.count, np.int64)
        unused = np.zeros(self._total, np.int64)
        trainers = {
            number: Trainer(self.engine.init(params), start, start, unused, self.policy.init())
            for number in range(self.trainers.count)
        }
        return AdaptiveState(trainers, 0, none, none)

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
        goal = checks.goal(state, self.period, rounds, steps, samples)
        if evaluate is None and self.trainers.hurt_bound is not None:
            raise ValueError("hurt_bound bounds the rise of a loss: give run(evaluate=)")
        state = self.warm(state, source)
        record = AdaptiveHistory()
        while not goal.reached(state):
            if self._behind(state):
                state = self._caught_up(state, source, goal)
                continue
            state, segment = self._segment(state, source, goal, participants, evaluate)
            record.segments.append(segment)
            self._book(segment)
        return state, record

    def _segment(self, state, source, goal, participants, evaluate):
        """Steps up to the end of the round or the goal; returns (state, segment)."""
        opening, looks = state.step % self.period == 0, {}
        merges = []
        if opening:
            given = state, self._programs(state), evaluate
            state, merges = self.trainer_merge.before_round(*given)
        plans = {number: self.switch.plan(t.batch) for number, t in state.trainers.items()}
        per_step = sum(plan.total for plan in plans.values())
        start, n, shares = state.step, goal.steps(state, per_step, self.period), {}
        mask_R = participants and participants((start // self.period + 1) * self.period)
        mask_R = None if mask_R is None else np.asarray(mask_R)[self._here]
        work_SxR = np.tile(sum(plan.samples_R for plan in plans.values()), (n, 1))
        seen = self._start_measurements(state, plans, source, mask_R) if opening else {}
        for number, trainer in state.trainers.items():
            self.noise.carry(number, trainer, seen.get(number))
        ran = {}
        for number, plan in plans.items():
            trainer = state.trainers[number]
            ready = set_lr_scale(trainer.state, state.samples, per_step, self._scale_of(plan))
            batches = self._batches(source, number, trainer.used_R, plan, n)
            cut = MicrobatchCut(plan.microbatch, plan.of(self._here).counts_R)
            loop = self._loops.of(number, ready)
            ran[number] = self.engine.run_on(loop, ready, batches, participants, cut)
        for number, (ended, history) in self._loops.landed(ran).items():
            plan, trainer = plans[number], state.trainers[number]
            steps, look = range(start + 1, start + n + 1), seen.get(number)
            trainer = trainer.replace(state=ended, used_R=trainer.used_R + n * plan.samples_R)
            when = plan, steps, self.period, mask_R
            trainer, decided, sent = self.noise.conclude(number, trainer, look, *when)
            if decided is not None:
                looks[number] = decided
            if look is not None:
                work_SxR[0] += self.noise.work(plan)
            given = (state.samples, per_step, self._scale_of(plan), n)
            rate = functools.partial(self._factors, *given)
            shares[number] = Share(history, plan, rate, sent)
            state = state.with_trainer(number, trainer)
        work_SxR = work_SxR[:, self._here] / self.reference_batch
        segment = Segment(start, n, shares, work_SxR, merges, looks)
        state = state.replace(samples=state.samples + n * per_step)
        if self._jobs is not None and state.step % self.period == 0:
            self._jobs.tell(state)
        return state, segment

    def _start_measurements(self, state, plans, source, mask_R) -> dict[int, Measurement | None]:
        """Start every trainer's measurement of its noise."""
        seen = {}
        for number, plan in plans.items():
            trainer = state.trainers[number]
            draw = functools.partial(self._draw, source, number, trainer.used_R)
            seen[number] = self.noise.start(trainer, plan, draw, mask_R)
        return seen

    def _scale_of(self, plan: Plan) -> float:
        return self._scale(plan.total / self._total / self.reference_batch)

    def _batches(self, source: Source, number: int, used_R: np.ndarray, plan: Plan, n: int):
        read = plan.of(self._here).read
        for k in range(n):
            yield self._draw(source, number, used_R + k * plan.samples_R, read)

    def _draw(self, source: Source, number: int, start_R: np.ndarray, count: int) -> PyTree:
        even = self.policy.shares is None
        return source(number, int(start_R[0]) if even else start_R[self._here], count)

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
            nbytes = self._bytes(state, example)
            self._plan_for(find_cap(nbytes, self._memory, self.policy.start, self.policy.cap))
        self._factors(0, 0, 1.0, 1)
        self.noise.warm(trainer.state, example)
        self.trainer_merge.warm(state, self._programs(state))
        warm = self.engine.warm(trainer.state, example, self.switch.buckets())
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
            return step_bytes(self.engine, one, example, microbatch) + waiting

        return needed

    def finish(self, state: AdaptiveState) -> AdaptiveState:
        """Drain, synchronise every trainer once more (`finish.finish`), and merge all into one.

        Raises:
          ValueError: the state was donated before.
        """
        state.refuse_donated()
        events, within = [], state.step % self.period > 0
        for number, trainer in state.trainers.items():
            self.noise.carry(number, trainer, None)
            ended, found = finish(self._loops.of(number, trainer.state), trainer.state)
            trainer = trainer.replace(state=ended)
            if within:
                trainer = self.noise.at_the_end(number, trainer, self.switch.plan(trainer.batch))
            state = state.with_trainer(number, trainer)
            events += [TrainerEvent.of(event, number) for event in found]
        if self.clock is not None:
            follow(self.clock, state.step, events)
        state = self.trainer_merge.all_into_one(state, self._programs(state))
        if self._jobs is not None:
            self._jobs.compare_at_the_end(state)
            self._jobs.tell(state)
        return state

    # -- jobs of their own ----------------------------------------------------------------------

    @property
    def delivery(self) -> JobDelivery | None:
        """To the other jobs; see `Engine`."""
        return self.engine.delivery

    def sync_loop(self, state: AdaptiveState) -> EventLoop:
        """The loop over events of the first trainer; steps are those of all."""
        [number, *_] = state.trainers
        return self._loops.of(number, state.first.state)

    def loop_of(self, trainer: int, state: TrainState) -> EventLoop:
        """The loop over events of a trainer, by its number."""
        return self._loops.of(trainer, state)

    def reconnect(self, state: AdaptiveState) -> None:
        """Start the exchanges of a restored state again; see `Engine.reconnect`."""
        if self._jobs is None:
            return
        for number, trainer in state.trainers.items():
            reconnect(self._jobs.of(number, trainer.state), trainer.state)

    def pass_steps(self, state: AdaptiveState, source: Source, goal: checks.Goal) -> AdaptiveState:
        """Let this region only land what the others land, to the end of the round or the goal.

        For a job that is one region of several. Trainers merge, and batches grow, as elsewhere; the
        samples of these steps count as used. The regions' own values stay as they are.
        """
        state = self.warm(state, source)
        if state.step % self.period == 0:
            state, _ = self.trainer_merge.before_round(state, self._programs(state), None)
        plans = {number: self.switch.plan(t.batch) for number, t in state.trainers.items()}
        steps = goal.steps(state, sum(plan.total for plan in plans.values()), self.period)
        when = range(state.step + 1, state.step + steps + 1), self.period, None
        state = self._jobs.passed(state, steps)
        for number, plan in plans.items():
            trainer = state.trainers[number]
            trainer = trainer.replace(used_R=trainer.used_R + steps * plan.samples_R)
            trainer, _, _ = self.noise.conclude(number, trainer, None, plan, *when)
            state = state.with_trainer(number, trainer)
        used = steps * sum(plan.total for plan in plans.values())
        return state.replace(samples=state.samples + used)

    def listen(self, state: AdaptiveState, only: bool) -> None:
        """Whether this region takes what the others exchange, and sends nothing."""
        self._jobs.listen(state, only)

    def passed_over(self, state: AdaptiveState) -> bool:
        """Whether the others go on without this region in the next exchange of any trainer."""
        return self._jobs.passed_over(state)

    def start_from_anchors(self, state: AdaptiveState) -> AdaptiveState:
        """Every trainer with its anchor's values, see `job_carrier.start_from_anchor`."""
        for number, trainer in state.trainers.items():
            own = start_from_anchor(self._jobs.of(number, trainer.state), trainer.state)
            state = state.with_trainer(number, trainer.replace(state=own))
        return state

    def _behind(self, state: AdaptiveState) -> int:
        """Whole rounds that the other jobs have landed beyond this state, at the end of a round."""
        if self._jobs is None or state.step % self.period:
            return 0
        return max(0, self.engine.delivery.frontier() - state.step) // self.period

    def _caught_up(self, state: AdaptiveState, source: Source, goal: checks.Goal) -> AdaptiveState:
        """Land the rounds that the others went on without this region, and start from the anchors.

        At its own pace it would never come up to them. The goal of the run holds for it, too.
        """
        for _ in range(self._behind(state)):
            if not goal.reached(state):
                state = self.pass_steps(state, source, goal)
        self._jobs.tell(state)
        return self.start_from_anchors(state)

    def _programs(self, state: AdaptiveState) -> RoundPrograms:
        return self.engine.sync_loop(state.first.state).programs

    # -- virtual time -------------------------------------------------------------------------

    def _book(self, segment: Segment) -> None:
        """Let the virtual clock run through a segment: one clock for all trainers of a region."""
        if self.clock is None:
            return
        for i, work_R in enumerate(segment.work_SxR):
            step = segment.start + i + 1
            drive(self.clock, step, segment.events(step), work=work_R)


class _OneLoop:
    """Of trainers on one mesh: they share the engine's loop, and what is due lands by itself."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def of(self, trainer: int, state: TrainState) -> EventLoop:
        del trainer
        return self.engine.sync_loop(state)

    def landed(self, ran: dict[int, tuple[TrainState, History]]):
        return ran
