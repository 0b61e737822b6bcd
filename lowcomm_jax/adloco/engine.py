"""Training with growing batches and several trainers that merge (AdLoCo, arXiv 2508.18182).

A round is the H inner steps between two exchanges. Before a round trainers may merge. At its first
step the engine measures every trainer's gradient noise, where all its regions hold the anchor's
values. From the noise the batch policy decides, at the round's end, how large the batch of the
*next* round is. The numbers are fetched once the round's steps run, so that no step waits for them.
Where every region is a job, they come with the round's payloads (`job_trainers`). A job of several
processes waits for its own before the steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from lowcomm_jax.adloco.history import Segment, Told
from lowcomm_jax.adloco.job_trainers import (
    carry,
    header_of,
    listen,
    rounds_missed,
    wait_for_payloads,
)
from lowcomm_jax.adloco.learning_rate import SCALINGS, factors, scale_lr, set_lr_scale
from lowcomm_jax.adloco.merge import merge, merge_all
from lowcomm_jax.adloco.probe import Probe, booked
from lowcomm_jax.adloco.setup import AdaptiveSetup
from lowcomm_jax.adloco.state import LOOKED, AdaptiveState, Trainer
from lowcomm_jax.adloco.step_plan import StepPlan, Switch
from lowcomm_jax.engine import Engine, Participants, book, mask_here
from lowcomm_jax.history import History
from lowcomm_jax.jobs.job_carrier import JobCarrier, start_from_anchor
from lowcomm_jax.mesh.regions import Regions
from lowcomm_jax.methods.base import Method
from lowcomm_jax.network import VirtualClock, follow
from lowcomm_jax.refusals import TITLE, microbatch_problems, refuse_setup
from lowcomm_jax.refused import is_whole, refuse
from lowcomm_jax.rules.batching import BatchPolicy, pooled
from lowcomm_jax.rules.trainers import Trainers
from lowcomm_jax.settings import with_settings
from lowcomm_jax.setup import takes_settings
from lowcomm_jax.sync.round_programs import RoundPrograms
from lowcomm_jax.sync.sync_loop import Loop

PyTree = Any
Source = Callable[[int, int, int], PyTree]


@dataclasses.dataclass(frozen=True)
class Goal:
    """Where a run ends: at a step, or at the first one by which `samples` were consumed."""

    step: float
    samples: float = math.inf

    @classmethod
    def of(cls, state: AdaptiveState, period: int, **given: int | None) -> Goal:
        """So many `rounds`, `steps` or `samples` from here: the first of them that is reached.

        A round that is under way counts, and one that was paused before it landed.

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
            under_way = int(state.counters.done_until) // period
            last = min(last, (under_way + named["rounds"]) * period)
        return cls(last, state.samples + named.get("samples", math.inf))

    def reached(self, state: AdaptiveState) -> bool:
        return state.step >= self.step or state.samples >= self.samples

    def steps(self, state: AdaptiveState, per_step: int, period: int) -> int:
        """Inner steps from here to the end of the round, or to the goal if that comes first."""
        left = min(period - state.step % period, self.step - state.step)
        samples = self.samples - state.samples
        return int(left if samples == math.inf else min(left, math.ceil(samples / per_step)))


class AdaptiveEngine:
    """Trains one model with a method that has a batch policy, and perhaps several trainers.

    Every trainer is an ordinary `TrainState` of an ordinary `Engine`: `plain`, or between jobs one
    of the same programs that names its exchanges by the trainer. One trainer makes the steps of a
    segment after the other. Trainers may ask for different batches, and free their memory as soon
    as they are merged. The random numbers of a step are the same for all of them.

    The method has a batch policy, `inner_batching`, and perhaps `trainers`. All trainers of a
    region share its virtual time and its links.

    Raises:
      ValueError: one message that lists every setting that cannot work, with its fix.
    """

    __doc__ = with_settings(__doc__, AdaptiveSetup)

    @takes_settings(AdaptiveSetup)
    def __init__(self, setup: AdaptiveSetup):
        refuse_setup(setup)
        method = setup.method
        policy, trainers = method.inner_batching, method.trainers or Trainers(1, None)
        cap = min(setup.largest_microbatch or policy.cap, policy.cap)
        switch = Switch(cap, policy.start, trainers.threshold)
        schedule = setup.schedule or jnp.ones_like
        single = dataclasses.replace(
            setup,
            inner=optax.chain(setup.inner, scale_lr(schedule)),
            method=dataclasses.replace(method, inner_batching=None, trainers=None),
            network=None,
            block=max(setup.block, math.ceil(policy.cap / cap)),  # it holds the longest step
        )
        refuse(TITLE, microbatch_problems(single, switch.buckets()))
        plain = Engine.of(single)
        self.plain: Engine = plain
        self.method: Method = method
        self.regions: Regions = plain.regions
        self.policy: BatchPolicy = policy
        self.trainers: Trainers = trainers
        self.switch: Switch = switch
        self.period: int = method.schedule.period
        self.reference_batch: int = setup.reference_batch or policy.start
        self.engines: dict[int, Engine] = dict.fromkeys(range(trainers.count), plain)
        self.clock: VirtualClock | None = None
        if (carrier := plain.carrier) is not None:
            carrier.exchange.keep_more(trainers.count)  # a round has as many exchanges
            for number in self.engines:
                own = carrier.of_trainer(number)
                own.header = header_of(None, plain.regions)
                self.engines[number] = plain.with_carrier(own)
        elif setup.links is not None and not setup.separate:
            self.clock = VirtualClock(setup.links, seed=setup.seed, record=True)
        self.probe: Probe | None = (
            Probe(plain, policy.microbatches) if policy.microbatches else None
        )
        self._scale, self._schedule, self._warmed = SCALINGS[setup.scaling], schedule, False
        self._told = Told()  # of a paused round that has landed since; the next segment tells it

    def init(self, params: PyTree) -> AdaptiveState:
        """Start every trainer in every region from `params` (see `Engine.init`)."""
        policy = self.policy
        trainers = {
            number: Trainer(policy.start, 0, policy.init(), state=engine.init(params))
            for number, engine in self.engines.items()
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
    ) -> tuple[AdaptiveState, History]:
        """Train for a number of rounds, of inner steps, or of samples of all trainers and regions.

        Of several given, the first that is reached ends it. A run may end anywhere in a round and
        go on there. With `samples` (tokens divided by the tokens of a sample) the last step is a
        whole one. Where a wait for other jobs is stopped (`RemoteExchange.stop_when`), the state
        stands within its step, and the next call goes on with it.

        Args:
          state: is donated; use the returned one.
          source: `(trainer, start, count)` -> host leaves `[R, count, ...]`, samples
            [start, start + count) of the streams (region, trainer): a pure function. R are this
            job's regions.
          participants: see `Engine.run`; of all trainers alike.

        Returns:
          (state, history): metrics of all trainers, and `work`, samples of a region's step over
          the reference batch. Rows have each trainer, merges (`adloco.history.Segment`), and what
          was decided (`looks` of `adloco.history.Told`).

        Raises:
          ValueError: no number, or a state that was donated before.
        """
        state.refuse_donated()
        goal = Goal.of(state, self.period, rounds=rounds, steps=steps, samples=samples)
        state, history = self.warm(state, source), History()
        if state.paused:
            told = Told()
            state = self._landed(state, np.ones(self.regions.count, bool), told)
            self._told = told
        while not (goal.reached(state) or state.paused):
            if missed := rounds_missed(self.carrier, state, self.period):
                state = self._caught_up(state, source, goal, missed)
            else:
                state = self._segment(state, source, goal, participants, history)
        return state, history

    def _segment(
        self,
        state: AdaptiveState,
        source: Source,
        goal: Goal,
        participants: Participants,
        history: History,
    ) -> AdaptiveState:
        """Steps up to the end of the round or the goal, by one trainer after the other.

        Args:
          history: gets them, and the events of all trainers.
        """
        # Taken first, so that a segment that raises leaves nothing for the next one to tell.
        told, self._told = self._told, Told()
        state, segment = self._opened(state, goal)
        start, steps, per_step = segment.start, segment.steps, segment.per_step
        consumed = state.samples
        lands_at = (start // self.period + 1) * self.period
        mask_R = mask_here(participants, lands_at, segment.regions, self.plain.here)
        work_RxS = np.full((self.regions.count, steps), per_step // segment.regions)
        measures = start % self.period == 0 and self.probe is not None and bool(mask_R.any())
        for number, plan in segment.plans.items():
            if measures:
                state, samples = self._measured(state, number, plan, source, mask_R)
                work_RxS[:, 0] += samples
            trainer = state.trainers[number]
            rate = consumed, per_step, self._scale(plan.samples / self.reference_batch)
            segment.rates[number] = factors(self._schedule, self.period, *rate)
            ready = set_lr_scale(trainer.state, *rate)
            starts = range(trainer.used, trainer.used + steps * plan.samples, plan.samples)
            batches = (source(number, first, plan.samples) for first in starts)
            engine = self.engines[number]
            carry(engine, number, trainer, told)
            ended, own = engine.run(ready, batches, participants, microbatch=plan.microbatch)
            segment.histories[number] = own
            told.add(number, own.events)
            state = segment.stepped(state, number, ended)
        if state.step % self.period == 0:
            state = self._landed(state, mask_R, told)
        events, work_RxS = told.in_order(), work_RxS / self.reference_batch
        # What a paused round lands is done before the first of these steps.
        first, made = start + 1, range(start + 1, state.step + 1)
        looks: dict[int, dict[str, Any]] = {}
        for step, found in told.looks.items():
            row = max(step, first)
            looks[row] = looks.get(row, {}) | found

        def more(step: int) -> dict[str, Any]:
            return segment.more(step) | ({"looks": looks[step]} if step in looks else {})

        metrics = {**segment.metrics(), "work": work_RxS}
        history.add(start, len(made), metrics, events, more, owed=first)
        if self.clock is not None:  # one for all trainers of a region
            book(self.clock, made, events, {"work": work_RxS})
        return state

    def _opened(self, state: AdaptiveState, goal: Goal) -> tuple[AdaptiveState, Segment]:
        """The state once two trainers have merged, where it is time, and the steps that follow."""
        merges = []
        round_, within = divmod(state.step, self.period)
        if not within and self.trainers.merges_at(round_, len(state.trainers)):
            pair = self.trainers.pair(state.requests)
            batches = tuple(state.requests[number] for number in pair)
            told = {"round": round_, "survivor": pair[0], "retired": pair[1], "batches": batches}
            state, merges = merge(self._programs(state), state, *pair), [told]
        plans = {number: self.switch.plan(asked) for number, asked in state.requests.items()}
        regions = self.plain.setup.regions
        per_step = regions * sum(plan.samples for plan in plans.values())
        steps = goal.steps(state, per_step, self.period)
        return state, Segment(state.step, regions, steps, per_step, plans, merges)

    def _measured(
        self, state: AdaptiveState, number: int, plan: StepPlan, source: Source, mask_R: np.ndarray
    ) -> tuple[AdaptiveState, int]:
        """The state with a trainer's noise, and how many samples of a region that took.

        They are those that it trains on next. What absent regions measure does not count.
        """
        trainer, size = state.trainers[number], self._measured_size(plan)
        batch = source(number, trainer.used, size * self.probe.count)
        measured = self.probe.measure(trainer.state, batch, size)
        measured = {**measured, LOOKED: mask_R.astype(np.float32)}
        state = state.with_trainer(number, trainer.replace(measured=measured))
        return state, self.probe.samples(size)

    def _landed(
        self, state: AdaptiveState, mask_R: np.ndarray, told: Told, stoppable: bool = True
    ) -> AdaptiveState:
        """Let the statistics of a round decide, once what was sent in it has landed.

        Payloads from other jobs land here; those of one program have, behind the last step.

        Args:
          mask_R: bool `[R]`, who took part in it; between jobs the record tells.
          told: gets the events, and what was decided.
          stoppable: whether a signal stops the wait for other jobs (`RemoteExchange.stop_when`);
            the state is then `paused`. Else this region catches up, and tells nobody.
        """
        if self.carrier is None:
            state = booked(state, mask_R, told)
        elif state.paused:
            loops = self.loops(state)
            if not wait_for_payloads(self.carrier.exchange, loops, stoppable):
                return state
            for number, trainer, loop in loops:
                listen(loop.carrier, number, told)
                with loop.carrier.ending(loop, trainer.state):
                    own = loop.go_on(trainer.state, np.ones(1, bool))
                told.add(number, loop.owed)
                loop.owed = []
                state = state.with_trainer(number, trainer.replace(state=own))
        state = self._decided(state, told)
        if self.carrier is not None and stoppable:
            self.carrier.tell(state, state.step, state.step)
        return state

    def _measured_size(self, plan: StepPlan) -> int:
        """Samples of a measured microbatch: all of them together are about one step's."""
        sizes = self.switch.buckets()
        return max([m for m in sizes if m * self.probe.count <= plan.samples], default=sizes[0])

    def _decided(self, state: AdaptiveState, told: Told) -> AdaptiveState:
        """Let the policy decide on the trainers' next requests, by what regions have measured."""
        for number, trainer in state.trainers.items():
            if (noise := told.noise.pop(number, None)) is not None:
                size = self._measured_size(self.switch.plan(trainer.request))
                statistics = pooled(noise, self.probe.count, size)
                memory, request = self.policy.decide(trainer.policy, statistics, trainer.request)
                looks = told.looks.setdefault(state.step, {})
                looks[str(number)] = {"request": request, **dataclasses.asdict(statistics)}
                trainer = trainer.replace(policy=memory, request=request)
            state = state.with_trainer(number, trainer.replace(measured=None))
        return state

    def finish(self, state: AdaptiveState) -> AdaptiveState:
        """Drain, synchronise every trainer once more (`finish.finish`), and merge all into one.

        Raises:
          ValueError: the state was donated before.
        """
        state.refuse_donated()
        told, self._told = Told(), Told()  # no segment follows that tells it
        everyone = np.ones(self.regions.count, bool)
        if self.carrier is None:
            state = booked(state, everyone, told)
        elif state.paused:
            state = self._landed(state, everyone, told, stoppable=False)
        for number, trainer, loop in self.loops(state):
            carry(self.engines[number], number, trainer, told)
            ended, events = loop.finish(trainer.state)
            told.add(number, events)
            state = state.with_trainer(number, trainer.replace(state=ended))
        if self.clock is not None:
            follow(self.clock, state.step, told.events)
        state = self._decided(state, told)  # within a round, with the last payload
        state = merge_all(self.trainers, self._programs(state), state)
        if self.carrier is not None:
            [(_, last, loop)] = self.loops(state)
            loop.carrier.compare_final_anchors(loop, last.state)
            self.carrier.tell(state, state.step, state.step)
        return state

    # -- compiling ------------------------------------------------------------------------------

    def warm(self, state: AdaptiveState, source: Source) -> AdaptiveState:
        """Compile, once, everything that growing batches and merges need.

        Args:
          state: is donated; use the returned one, which holds the same values.
          source: see `run`; nothing is trained on.
        """
        if self._warmed:
            return state
        number, trainer = next(iter(state.trainers.items()))
        example = source(number, 0, 1)
        factors(self._schedule, self.period, 0, 0, 1.0)
        if self.probe is not None:
            self.probe.warm(trainer.state, example, self.switch.buckets())
        if self.trainers.merge_every is not None and len(state.trainers) > 1:
            merge(self._programs(state), state, *self.trainers.pair(state.requests))
        warm = self.plain.warm(trainer.state, example, self.switch.buckets())
        self._warmed = True
        return state.with_trainer(number, trainer.replace(state=warm))

    def _programs(self, state: AdaptiveState) -> RoundPrograms:
        return self.plain.sync_loop(state.first.state).programs

    # -- loops, and jobs of their own -----------------------------------------------------------

    def loops(self, state: AdaptiveState) -> list[tuple[int, Trainer, Any]]:
        """(number, trainer, its loop over events) of every trainer; on one mesh all have one."""
        return [
            (number, trainer, self.engines[number].sync_loop(trainer.state))
            for number, trainer in state.trainers.items()
        ]

    def sync_loop(self, state: AdaptiveState) -> Loop:
        """The loop over events of the first trainer; steps are those of all."""
        [number, *_] = state.trainers
        return self.engines[number].sync_loop(state.first.state)

    @property
    def carrier(self) -> JobCarrier | None:
        """To the other jobs; see `Engine`."""
        return self.plain.carrier

    def reconnect(self, state: AdaptiveState) -> None:
        """Start the exchanges of a restored state again; see `Engine.reconnect`."""
        for _, trainer, loop in self.loops(state):
            loop.carrier.reconnect(loop, trainer.state)

    def start_from_anchors(self, state: AdaptiveState) -> AdaptiveState:
        """Every trainer with its anchor's values, see `job_carrier.start_from_anchor`."""
        for number, trainer, loop in self.loops(state):
            own = start_from_anchor(loop, trainer.state)
            state = state.with_trainer(number, trainer.replace(state=own))
        return state

    def pass_steps(self, state: AdaptiveState, source: Source, goal: Goal) -> AdaptiveState:
        """Let this region only land what the others land, to the end of the round or the goal.

        For a job that is one region of several. Trainers merge, and batches grow, as elsewhere; the
        samples of these steps count as used. The regions' own values stay as they are.
        """
        state, segment = self._opened(self.warm(state, source), goal)
        nobody, told = np.zeros(1, bool), Told()
        for number, trainer, loop in self.loops(state):
            carry(self.engines[number], number, trainer, told)
            ended, _ = loop.after(trainer.state, segment.steps, nobody)
            state = segment.stepped(state, number, ended)
        if state.step % self.period == 0:
            state = self._landed(state, nobody, told, stoppable=False)
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
        self.carrier.tell(state, state.step, state.step)
        return self.start_from_anchors(state)
