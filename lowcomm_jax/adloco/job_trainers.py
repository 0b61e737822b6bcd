"""The trainers of a job that is one region of several: their loops, and what regions agree on.

Every trainer exchanges for itself: trainer i of a region with trainer i of the others, under names
that begin with its number. After the last step of a round all trainers send before the first one
lands, so that a region waits for the slowest exchange and not for their sum.

With a payload travel the region's own gradient statistics. The batch of the next round, and which
trainers merge, follow from those of the regions that were counted: from what the commit record
names, which is the same in every region. So nothing is put off while the store is away: a region
waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from lowcomm_jax.adloco.probe import SCALARS
from lowcomm_jax.adloco.state import AdaptiveState, Trainer
from lowcomm_jax.engine import Engine
from lowcomm_jax.history import History
from lowcomm_jax.jobs.job_carrier import JobCarrier, start_from_anchor
from lowcomm_jax.jobs.job_delivery import JobDelivery
from lowcomm_jax.rounds.state_transfer import State, shared_state
from lowcomm_jax.schedule.base import Send, Stage
from lowcomm_jax.state.leaves import trainer_prefix
from lowcomm_jax.state.train_state import TrainState
from lowcomm_jax.sync.carrier import Collected
from lowcomm_jax.sync.sync_loop import EventLoop, SyncLoop

HAS_LOOKED = "looked"
"""1 where a region has measured in this round, and 0 where it came in after the round's start."""

NOTHING = {name: np.zeros(1, np.float32) for name in (*SCALARS, HAS_LOOKED)}
Ran = dict[int, tuple[TrainState, History]]


class TrainerCarrier(JobCarrier):
    """`JobCarrier` of one trainer, whose payloads carry statistics, and wait for the others'.

    The region's progress and its state are told for all trainers together (`JobTrainers.tell`), and
    anchors are compared when all trainers are one.

    Attributes:
      header: this region's statistics of the round, float32 `[1]` by name.
      heard: of the last exchange, (statistics `[N]` by name, bool `[N]` who was counted).
      holds: whether what was sent waits: nothing lands.
    """

    def __init__(self, delivery: JobDelivery, holds: bool = True):
        super().__init__(delivery)
        self.header = NOTHING
        self.heard: tuple[dict[str, np.ndarray], np.ndarray] | None = None
        self.holds = holds

    def alone(self) -> TrainerCarrier:
        return TrainerCarrier(self.delivery.loopback(), holds=False)

    def reach(self, loop: EventLoop, state: TrainState, stage: Stage, begun: bool) -> bool:
        return not self.holds or isinstance(stage[0], Send)

    @contextlib.contextmanager
    def ending(self, loop: SyncLoop, state: TrainState) -> Iterator[None]:
        """Lets what was sent land."""
        held, self.holds = self.holds, False
        try:
            yield
        finally:
            self.holds = held

    def collect(
        self, loop: EventLoop, state: TrainState, key: str, last: bool, adopts: bool
    ) -> tuple[TrainState, Collected]:
        state, collected = super().collect(loop, state, key, last, adopts)
        flight = collected.flight
        self.heard = dict(flight.header), np.asarray(flight.takes_part)
        return state, collected

    def sends(self, seen: dict[str, jax.Array] | None, kept: dict[str, float] | None) -> None:
        """Let the next payload carry what was just `seen`, or `kept` from earlier in the round."""
        self.header, self.heard = NOTHING, None
        if seen is not None:
            self.header = {**seen, HAS_LOOKED: np.ones(1, np.float32)}
        elif kept is not None:
            self.header = {name: np.array([x], np.float32) for name, x in kept.items()}

    def to_keep(self) -> dict[str, float]:
        """This region's statistics of a round that goes on, for `sends`."""
        return {name: float(np.asarray(x)[0]) for name, x in self.header.items()}

    def votes(self) -> tuple[dict[str, np.ndarray], np.ndarray] | None:
        """Statistics `[N]` by name that the last exchange brought, and bool `[N]`, who was counted
        and has measured; None = nobody.
        """
        if self.heard is None:
            return None
        values_N, counted_N = self.heard
        counted_N = counted_N & (np.asarray(values_N[HAS_LOOKED]) > 0)
        return (values_N, counted_N) if counted_N.any() else None

    def done(self, loop: EventLoop, state: TrainState, in_time: bool) -> None:
        """Nothing."""

    def close(self, loop: EventLoop, state: TrainState) -> None:
        """Nothing."""


class JobTrainers:
    """The loops of all trainers of one region; they share its exchange and its programs."""

    def __init__(self, engine: Engine, count: int):
        """`count`: trainers at the start; a round has as many exchanges."""
        self.engine, self.delivery = engine, engine.delivery
        self._loops: dict[tuple[Any, int], SyncLoop] = {}
        self.delivery.gives = given
        self.delivery.exchange.keep_more(count)

    def loop(self, number: int, state: TrainState) -> SyncLoop:
        """The loop of a trainer."""
        key = state.layout, number
        if key not in self._loops:
            own = JobDelivery(self.delivery.exchange, shared=True, prefix=f"{number}.")
            own.slicings = self.delivery.slicings
            own.never_defers, own.tells = True, False
            own.participation = self.delivery.participation
            programs = self.engine.sync_loop(state).programs
            self._loops[key] = SyncLoop(programs, self.engine.weights, TrainerCarrier(own))
        return self._loops[key]

    def _all(self, state: AdaptiveState) -> Iterator[tuple[int, Trainer, SyncLoop]]:
        for number, trainer in state.trainers.items():
            yield number, trainer, self.loop(number, trainer.state)

    # -- rounds -----------------------------------------------------------------------------------

    def landed(self, ran: Ran) -> Ran:
        """Land what all trainers have sent; its events are added to their histories."""
        jax.block_until_ready([state.inner.params for state, _ in ran.values()])
        loops = {number: self.loop(number, state) for number, (state, _) in ran.items()}
        # All at once, although they land one by one: their deadlines run at the same time.
        if flying := [name for loop in loops.values() for name in loop.carrier.delivery.flying]:
            self.delivery.exchange.arrives(flying)
        out = {}
        for number, (state, history) in ran.items():
            loop, events = loops[number], []
            if state.counters.behind:
                with loop.carrier.ending(loop, state):
                    state = loop.run_due(state, np.ones(1, bool), events)
            history.add_events(events)
            out[number] = state, history
        return out

    @staticmethod
    def passed(loop: EventLoop, state: TrainState, steps: int) -> tuple[TrainState, History]:
        """A trainer after so many steps of one round that this region did not make."""
        state, events = loop.after(state, steps, np.zeros(1, bool))
        history = History(int(state.counters.step))
        history.add(0, {}, events)
        return state, history

    def rounds_missed(self, state: AdaptiveState, period: int) -> int:
        """Whole rounds that the other jobs have landed beyond this state, at the end of a round."""
        if state.step % period:
            return 0
        return max(0, self.delivery.exchange.frontier() - state.step) // period

    # -- the other jobs ---------------------------------------------------------------------------

    def tell(self, state: AdaptiveState) -> None:
        """Tell the others of this region's progress, and give a newcomer the state it asks for."""
        self.delivery.exchange.beat(state.step, state.step)
        self.delivery.answer(state)

    def reconnect(self, state: AdaptiveState) -> None:
        """Start the exchanges of a restored state again; see `Engine.reconnect`."""
        for _, trainer, loop in self._all(state):
            loop.carrier.reconnect(loop, trainer.state)

    def listen(self, state: AdaptiveState, only: bool) -> None:
        """Whether trainers take what the others exchange, and send nothing."""
        for _, _, loop in self._all(state):
            loop.carrier.delivery.listens_only = only

    def passed_over(self, state: AdaptiveState) -> bool:
        """Whether the others go on without this region in the next exchange of any trainer."""
        sends = int(state.counters.sends.sum())
        return any([x.carrier.delivery.passed_over(sends) for _, _, x in self._all(state)])

    def start_from_anchors(self, state: AdaptiveState) -> AdaptiveState:
        """Every trainer with its anchor's values, see `job_carrier.start_from_anchor`."""
        for number, trainer, loop in self._all(state):
            own = start_from_anchor(loop, trainer.state)
            state = state.with_trainer(number, trainer.replace(state=own))
        return state

    def compare_at_the_end(self, state: AdaptiveState) -> None:
        """Compare the anchor of the one trainer that is left with those of the other jobs.

        Raises:
          Parted: another region's anchor is another.
        """
        [(_, trainer, loop)] = self._all(state)
        loop.carrier.delivery.compare_final_anchors(trainer.state, loop.fragments)


def given(state: AdaptiveState) -> State:
    """What a region that comes back is given: (step, arrays by name, document)."""
    arrays: dict[str, np.ndarray] = {}
    for number, trainer in state.trainers.items():
        _, own, _ = shared_state(trainer.state)
        arrays |= {trainer_prefix(number) + name: x for name, x in own.items()}
    return state.step, arrays, {"in_flight": [], "trainers": state.as_document()}
