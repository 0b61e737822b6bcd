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

from lowcomm_jax.adloco.history import OverTrainers, Told
from lowcomm_jax.adloco.job_trainers import carry, land, wait_for_payloads
from lowcomm_jax.adloco.learning_rate import (
    SCALINGS,
    LrScaleState,
    factor_after,
    scale_lr,
    set_lr_scale,
)
from lowcomm_jax.adloco.merge import merge
from lowcomm_jax.adloco.probe import Probe, booked
from lowcomm_jax.adloco.setup import AdaptiveSetup
from lowcomm_jax.adloco.state import AdaptiveState, Trainer
from lowcomm_jax.adloco.step_plan import Switch
from lowcomm_jax.engine import Engine, Participants, book, mask_here
from lowcomm_jax.history import Event, History
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
from lowcomm_jax.state.train_state import TrainState
from lowcomm_jax.sync.sync_loop import Loop
from lowcomm_jax.train.batch_blocks import batch_size

PyTree = Any
Source = Callable[[int, int, int], PyTree]
Act = Callable[[Any, TrainState], tuple[TrainState, list[Event]]]


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
        rounds, steps, samples = (named.get(name, math.inf) for name in given)
        under_way = int(state.counters.done_until) // period
        return cls(min((under_way + rounds) * period, state.step + steps), state.samples + samples)

    def left(self, state: AdaptiveState, per_step: int = 1) -> float:
        """Inner steps that are left, of so many samples each; at most 0 once it is reached."""
        samples = np.ceil((self.samples - state.samples) / per_step)
        return min(self.step - state.step, float(samples))


def drawn(source: Source, trainer: int, start: int, count: int) -> PyTree:
    """So many samples of a trainer's streams.

    Raises:
      ValueError: the source gives another number.
    """
    batch = source(trainer, start, count)
    if (found := batch_size(batch)) != count:
        asked = f"trainer {trainer} asks for {count} samples from {start} on"
        raise ValueError(f"{asked}, and the source gives {found} a region: give as many")
    return batch


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
        self.carrier: JobCarrier | None = plain.carrier
        self.engines: dict[int, Engine] = dict.fromkeys(range(trainers.count), plain)
        self.clock: VirtualClock | None = None
        if self.carrier is not None:
            self.carrier.exchange.keep_more(trainers.count)  # a round has as many exchanges
            for number in self.engines:
                self.engines[number] = plain.with_carrier(self.carrier.of_trainer(number))
                carry(self.engines[number], number, None, Told())
        elif setup.links is not None and not setup.separate:
            self.clock = VirtualClock(setup.links, seed=setup.seed, record=True)
        self.probe: Probe = Probe(plain, policy.microbatches)
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
          the reference batch. Rows have each trainer: `batch` (asked for), `samples` (of all
          regions), `microbatch`, `rate` (factor on the learning rate) and `loss` (mean over
          regions). They have merges in the first one of a round, and what was decided
          (`Told.looks`) in its last one. What is decided after a stop stands in the row that
          follows.

        Raises:
          ValueError: no number; a state that was donated before, or made by another engine; a
            source that gives another number of samples.
        """
        state.refuse_donated()
        self.sync_loop(state)  # refuses a state of another engine
        goal = Goal.of(state, self.period, rounds=rounds, steps=steps, samples=samples)
        state, history = self.warm(state, source), History()
        if state.paused:
            told = Told()
            state = self._landed(state, told)
            self._told = told
        while goal.left(state) > 0 and not state.paused:
            # Others have landed the next round: at its own pace it would never come up to them.
            at_end = self.carrier is not None and state.step % self.period == 0
            if at_end and self.carrier.exchange.frontier() >= state.step + self.period:
                state = self.start_from_anchors(self.pass_steps(state, source, goal))
                self.carrier.tell(state, state.step, state.step)
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
        state, steps, samples = self._opened(state, goal, told)
        start, consumed, regions = state.step, state.samples, self.plain.setup.regions
        lands_at = (start // self.period + 1) * self.period
        mask_R = mask_here(participants, lands_at, regions, self.plain.here)
        work_RxS = np.full((self.regions.count, steps), samples)
        requests, rates, histories = state.requests, {}, {}
        measures = start % self.period == 0 and self.probe.count > 0 and bool(mask_R.any())
        for number, trainer in state.trainers.items():
            own = self.switch.samples(trainer.request)
            if measures:  # of the samples that it trains on next
                size = self.switch.measured(trainer.request, self.probe.count)
                batch = drawn(source, number, trainer.used, size * self.probe.count)
                measured = self.probe.measure(trainer.state, batch, size, mask_R)
                trainer = trainer.replace(measured=measured)
                work_RxS[:, 0] += 2 * size * self.probe.count  # in two passes
            scale = np.float32(self._scale(own / self.reference_batch))
            rates[number] = LrScaleState(np.int32(consumed), np.int32(regions * samples), scale)
            ready = set_lr_scale(trainer.state, rates[number])
            starts = range(trainer.used, trainer.used + steps * own, own)
            batches = (drawn(source, number, first, own) for first in starts)
            engine, microbatch = self.engines[number], self.switch.microbatch(trainer.request)
            carry(engine, number, trainer.measured, told)
            ended, record = engine.run(ready, batches, participants, microbatch=microbatch)
            histories[number] = record
            told.add(number, record.events)
            state = state.with_trainer(number, trainer.replace(state=ended))
        state = self._counted(state, steps)
        if state.step % self.period == 0:
            state = self._landed(state, told, mask_R)
        events, work = told.in_order(), {"work": work_RxS / self.reference_batch}
        metrics = {name: OverTrainers([*histories.values()], name) for name in record} | work

        def more(step: int) -> dict[str, Any]:
            nth = step - start - 1
            trainers = {
                str(number): {
                    "batch": asked,
                    "samples": regions * self.switch.samples(asked),
                    "microbatch": self.switch.microbatch(asked),
                    "rate": float(factor_after(self._schedule, rates[number], nth)),
                    "loss": float(np.mean(histories[number]["loss"][nth], dtype=float)),
                }
                for number, asked in requests.items()
            }
            merges = told.merges if step == start + 1 else []
            looks = {str(i): look for at, i, look in told.looks if max(at, start + 1) == step}
            found = {"trainers": trainers, "merges": merges, "looks": looks}
            return {name: what for name, what in found.items() if what}

        # What a paused round lands and decides is done before the first of these steps.
        history.add(start, steps, metrics, events, more, owed=start + 1)
        if self.clock is not None:  # one for all trainers of a region
            book(self.clock, range(start + 1, start + steps + 1), events, work)
        return state

    def _opened(
        self, state: AdaptiveState, goal: Goal, told: Told
    ) -> tuple[AdaptiveState, int, int]:
        """The state once two trainers have merged, where it is time, and the steps that follow.

        `told` gets the merge. The last number are samples of a region's step, of all trainers.
        """
        round_, within = divmod(state.step, self.period)
        if not within and self.trainers.merges_at(round_, len(state.trainers)):
            survivor, retired = self.trainers.ranked(state.requests)[-2:]
            batches = state.requests[survivor], state.requests[retired]
            state = merge(self.plain, state, survivor, retired)
            told.merges.append(
                {"round": round_, "survivor": survivor, "retired": retired, "batches": batches}
            )
        samples = sum(self.switch.samples(asked) for asked in state.requests.values())
        left = goal.left(state, self.plain.setup.regions * samples)
        return state, int(min(self.period - state.step % self.period, left)), samples

    def _counted(self, state: AdaptiveState, steps: int) -> AdaptiveState:
        """The state with the samples of so many steps of every trainer counted."""
        used = {i: steps * self.switch.samples(asked) for i, asked in state.requests.items()}
        more = self.plain.setup.regions * sum(used.values())
        state = state.each(lambda i, trainer: trainer.replace(used=trainer.used + used[i]))
        return state.replace(samples=state.samples + more)

    def _landed(
        self,
        state: AdaptiveState,
        told: Told,
        mask_R: np.ndarray | None = None,
        stoppable: bool = True,
    ) -> AdaptiveState:
        """Let the policy decide on the next requests, once what was sent in a round has landed.

        Payloads from other jobs land here; those of one program have, behind the last step.

        Args:
          told: gets the events, and what was decided; has what regions have measured.
          mask_R: bool `[R]`, who took part in it, None = everyone; between jobs the record tells.
          stoppable: whether a signal stops the wait for other jobs (`RemoteExchange.stop_when`);
            the state is then `paused`. Else this region catches up, and tells nobody.
        """
        if self.carrier is None:
            everyone = np.ones(self.regions.count, bool)
            state = booked(state, everyone if mask_R is None else mask_R, told)
        elif state.paused:
            if not wait_for_payloads(self.carrier.exchange, self.loops(state), stoppable):
                return state
            state = self._each(state, told, land)
        noise, told.noise = told.noise, {}
        for number, noise_nx3 in noise.items():
            trainer = state.trainers[number]
            size = self.switch.measured(trainer.request, self.probe.count)
            statistics = pooled(noise_nx3, self.probe.count, size)
            memory, request = self.policy.decide(trainer.policy, statistics, trainer.request)
            look = {"request": request, **dataclasses.asdict(statistics)}
            told.looks.append((state.step, number, look))
            state = state.with_trainer(number, trainer.replace(policy=memory, request=request))
        state = state.each(lambda _, trainer: trainer.replace(measured=None))
        if self.carrier is not None and stoppable:
            self.carrier.tell(state, state.step, state.step)
        return state

    def finish(self, state: AdaptiveState) -> AdaptiveState:
        """Drain, synchronise every trainer once more (`finish.finish`), and merge all into one.

        Raises:
          ValueError: the state was donated before.
        """
        state.refuse_donated()
        told, self._told = Told(), Told()  # no segment follows that tells it
        if state.paused:
            state = self._landed(state, told, stoppable=False)
        state = self._each(state, told, lambda loop, own: loop.finish(own))
        state = self._landed(state, told, stoppable=False)  # within a round, with the last payload
        if self.clock is not None:
            follow(self.clock, state.step, told.events)
        if len(state.trainers) > 1:
            state = merge(self.plain, state, *self.trainers.ranked(state.requests))
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
        factor_after(self._schedule, LrScaleState(np.int32(0), np.int32(0), np.float32(1)), 0)
        if self.probe.count:
            self.probe.warm(trainer.state, example, self.switch.buckets())
        if self.trainers.merge_every is not None and len(state.trainers) > 1:
            merge(self.plain, state, *self.trainers.ranked(state.requests)[-2:])
        warm = self.plain.warm(trainer.state, example, self.switch.buckets())
        self._warmed = True
        return state.with_trainer(number, trainer.replace(state=warm))

    # -- loops, and jobs of their own -----------------------------------------------------------

    def loops(self, state: AdaptiveState) -> list[tuple[int, Trainer, Any]]:
        """(number, trainer, its loop over events) of every trainer; on one mesh all have one."""
        return [
            (number, trainer, self.engines[number].sync_loop(trainer.state))
            for number, trainer in state.trainers.items()
        ]

    def sync_loop(self, state: AdaptiveState) -> Loop:
        """The loop over events of the first trainer; steps are those of all."""
        return self.loops(state)[0][2]

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

    def _each(self, state: AdaptiveState, told: Told, act: Act) -> AdaptiveState:
        """The state once every trainer's loop has acted.

        Args:
          told: gets the events, and hears what lands.
          act: loop, the trainer's training state -> what this then is, and events.
        """
        for number, trainer, loop in self.loops(state):
            carry(self.engines[number], number, trainer.measured, told)
            own, events = act(loop, trainer.state)
            told.add(number, events)
            state = state.with_trainer(number, trainer.replace(state=own))
        return state

    def pass_steps(self, state: AdaptiveState, source: Source, goal: Goal) -> AdaptiveState:
        """Let this region only land what the others land, to the end of the round or the goal.

        For a job that is one region of several. Trainers merge, and batches grow, as elsewhere; the
        samples of these steps count as used. The regions' own values stay as they are.
        """
        nobody, told = np.zeros(1, bool), Told()
        state, steps, _ = self._opened(self.warm(state, source), goal, told)
        state = self._each(state, told, lambda loop, own: loop.after(own, steps, nobody))
        state = self._counted(state, steps)
        return state if state.step % self.period else self._landed(state, told, stoppable=False)
