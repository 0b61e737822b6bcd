"""The trainers of a job that is one region of several: their loops, and what regions agree on.

`JobTrainers` has a loop for each trainer (`runtime.trainer_carrier`). `JobNoise` lets the batch
policy decide from the statistics that came with a round's payloads. `given` is the state that a
region gives to one that comes back (`recovery.rejoin_trainers`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from lowcomm_jax.adaptive.noise_measurement import SCALARS, Measurement, NoiseMeasurement
from lowcomm_jax.adaptive.state import AdaptiveState, Trainer
from lowcomm_jax.batching import Plan, pooled
from lowcomm_jax.engine import Engine
from lowcomm_jax.history import Event, History
from lowcomm_jax.runtime.state_transfer import State, shared_state
from lowcomm_jax.runtime.trainer_carrier import TrainerCarrier, TrainerDelivery
from lowcomm_jax.state.leaves import trainer_prefix
from lowcomm_jax.state.train_state import TrainState
from lowcomm_jax.sync.sync_loop import EventLoop, SyncLoop

HAS_LOOKED = "looked"
"""1 where a region has measured in this round, and 0 where it came in after the round's start."""

NOTHING = {name: np.zeros(1, np.float32) for name in (*SCALARS, HAS_LOOKED)}


class JobTrainers:
    """The loops of all trainers of one region; they share its exchange and its programs."""

    def __init__(self, engine: Engine, count: int):
        """`count`: trainers at the start; a round has as many exchanges."""
        self.engine = engine
        self._loops: dict[tuple[Any, int], EventLoop] = {}
        self._slicings: dict[tuple[int, int], Any] = {}
        engine.delivery.gives = given
        engine.delivery.exchange.keep_more(count)

    def of(self, trainer: int, state: TrainState) -> EventLoop:
        """The loop of a trainer."""
        key = state.layout, trainer
        if key not in self._loops:
            programs, delivery = self.engine.sync_loop(state).programs, self.engine.delivery
            given = trainer, self._slicings, delivery.participation
            own = TrainerDelivery(delivery.exchange, *given)
            carrier = TrainerCarrier(own, NOTHING)
            self._loops[key] = SyncLoop(programs, self.engine.weights, carrier)
        return self._loops[key]

    def landed(
        self, ran: dict[int, tuple[TrainState, History]]
    ) -> dict[int, tuple[TrainState, History]]:
        """Land what all trainers have sent; its events are added to their histories."""
        out = {}
        jax.block_until_ready([state.inner.params for state, _ in ran.values()])
        # All at once, although they land one by one: their deadlines run at the same time.
        carriers = [self.of(number, state).carrier for number, (state, _) in ran.items()]
        flying = [name for carrier in carriers for name in carrier.delivery.flying]
        if flying:
            self.engine.delivery.exchange.arrives(flying)
        for trainer, (state, history) in ran.items():
            loop, events = self.of(trainer, state), []
            if state.counters.behind:
                with loop.carrier.landing():
                    state = loop.run_due(state, np.ones(1, bool), events)
            out[trainer] = state, history
            history.add_events(events)
        return out

    def passed(self, state: AdaptiveState, steps: int) -> AdaptiveState:
        """The trainers after so many steps of one round, in which this region only lands."""
        nobody = np.zeros(1, bool)
        ran = {}
        for number, trainer in state.trainers.items():
            loop = self.of(number, trainer.state)
            loop.carrier.measured, loop.carrier.heard = NOTHING, None
            after, events = loop.after(trainer.state, steps, nobody)
            history = History(int(after.counters.step))
            history.add(0, {}, events)
            ran[number] = after, history
        for number, (after, _) in self.landed(ran).items():
            state = state.with_trainer(number, state.trainers[number].replace(state=after))
        return state

    def listen(self, state: AdaptiveState, only: bool) -> None:
        """Whether trainers take what the others exchange, and send nothing."""
        for number, trainer in state.trainers.items():
            self.of(number, trainer.state).carrier.delivery.listens_only = only

    def passed_over(self, state: AdaptiveState) -> bool:
        """See `JobDelivery.passed_over`; of any trainer."""
        return any(
            [
                self.of(number, trainer.state).carrier.delivery.passed_over(
                    int(trainer.state.counters.sends.sum())
                )
                for number, trainer in state.trainers.items()
            ]
        )

    def tell(self, state: AdaptiveState) -> None:
        """Tell the others of this region's progress, and give a newcomer the state it asks for."""
        delivery = self.engine.delivery
        delivery.exchange.beat(state.step, state.step)
        delivery.answer(state)

    def compare_at_the_end(self, state: AdaptiveState) -> None:
        """Compare the anchor of the one trainer that is left with those of the other jobs.

        Raises:
          Parted: another region's anchor is another.
        """
        [(number, trainer)] = state.trainers.items()
        loop = self.of(number, trainer.state)
        loop.carrier.compare_at_the_end(loop, trainer.state)


@dataclasses.dataclass(frozen=True)
class JobNoise(NoiseMeasurement):
    """Every region measures for itself; statistics travel with the round's payloads.

    So the decision falls at the end of a round, from the regions that were counted. In between,
    `Trainer.measured` keeps this region's own.
    """

    jobs: JobTrainers

    def carry(self, number: int, trainer: Trainer, seen: Measurement | None) -> None:
        loop, measured = self.jobs.of(number, trainer.state), NOTHING
        if seen is not None:
            measured = {**seen.values_R, HAS_LOOKED: np.ones(1, np.float32)}
        elif trainer.measured is not None:
            measured = {k: np.array([x], np.float32) for k, x in trainer.measured.items()}
        loop.carrier.measured, loop.carrier.heard = measured, None

    def conclude(
        self,
        number: int,
        trainer: Trainer,
        seen: Measurement | None,
        plan: Plan,
        steps: range,
        period: int,
        mask_R: np.ndarray | None,
    ) -> tuple[Trainer, dict[str, float] | None, list[Event]]:
        loop = self.jobs.of(number, trainer.state)
        if steps[-1] % period:  # the round goes on
            own = {name: float(np.asarray(x)[0]) for name, x in loop.carrier.measured.items()}
            return trainer.replace(measured=own), None, []
        trainer = trainer.replace(measured=None)
        if self.probe is None or loop.carrier.heard is None:
            return trainer, None, []
        values_N, counted_N = loop.carrier.heard
        counted_N = counted_N & (np.asarray(values_N[HAS_LOOKED]) > 0)
        if not counted_N.any():
            return trainer, None, []
        scope, count = self.probe.scope, self.probe.count
        found = pooled(values_N, scope, count, self.size(plan), counted_N)
        return *self.decide(trainer, found), []

    def at_the_end(self, number: int, trainer: Trainer, plan: Plan) -> Trainer:
        """As on the mesh, where a round's decision is known at its first step."""
        whole = range(1, 2), 1, None
        return self.conclude(number, trainer, None, plan, *whole)[0]


# -- states that travel ------------------------------------------------------------------------


def given(state: AdaptiveState) -> State:
    """What a region that comes back is given: (step, arrays by name, document)."""
    arrays: dict[str, np.ndarray] = {}
    for number, trainer in state.trainers.items():
        _, own, _ = shared_state(trainer.state)
        arrays |= {trainer_prefix(number) + name: x for name, x in own.items()}
    return state.step, arrays, {"in_flight": [], "trainers": state.as_document()}
