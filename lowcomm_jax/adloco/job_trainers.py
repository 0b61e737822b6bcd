"""The trainers of a job that is one region of several: their loops, and what regions agree on.

Every trainer exchanges for itself: trainer i of a region with trainer i of the others, under names
that begin with its number. After the last step of a round all trainers send before the first one
lands, so that a region waits for the slowest exchange and not for their sum. Until then each stands
within its step (`Role.holds`), as one does that a signal has stopped there.

With a payload travel the region's own gradient statistics. The batch of the next round, and which
trainers merge, follow from those of the regions that were counted: from what the commit record
names, which is the same in every region. So nothing is put off while the store is away: a region
waits.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from lowcomm_jax.adloco.probe import SCALARS
from lowcomm_jax.adloco.state import LOOKED, AdaptiveState, Trainer, of_counted
from lowcomm_jax.engine import Engine
from lowcomm_jax.history import Event
from lowcomm_jax.jobs.given_state import given
from lowcomm_jax.jobs.job_carrier import Counted, start_from_anchor
from lowcomm_jax.mesh.arrays import place
from lowcomm_jax.mesh.regions import REGION
from lowcomm_jax.methods.base import Method
from lowcomm_jax.rounds.state_transfer import State
from lowcomm_jax.state.leaves import trainer_prefix
from lowcomm_jax.state.train_state import TrainState
from lowcomm_jax.sync.sync_loop import SyncLoop

_POLL_SECONDS = 0.05


class JobTrainers:
    """The loops of all trainers of one region; they share its exchange and its programs."""

    def __init__(self, engine: Engine, count: int):
        """`count`: trainers at the start; a round has as many exchanges."""
        self.engine, self.carrier = engine, engine.carrier
        self._loops: dict[tuple[Any, int], SyncLoop] = {}
        self._counted: dict[int, Counted] = {}  # by trainer, what the last exchange brought
        self.carrier.exchange.keep_more(count)

    def loop(self, number: int, state: TrainState) -> SyncLoop:
        """The loop of a trainer."""
        key = state.layout, number
        if key not in self._loops:
            carrier = self.carrier.of_trainer(number)
            carrier.header = self._header(None)
            carrier.witness = functools.partial(self._counted.__setitem__, number)
            programs = self.engine.sync_loop(state).programs
            self._loops[key] = SyncLoop(programs, self.engine.weights, carrier)
        return self._loops[key]

    def _header(self, measured: dict[str, Any] | None) -> dict[str, jax.Array]:
        """What a payload carries, `[1, 1]` by name; zeros where nothing was measured."""
        numbers = {name: [0.0] for name in (*SCALARS, LOOKED)} | (measured or {})
        arrays = {name: np.asarray(x, np.float32)[:, None] for name, x in numbers.items()}
        return place(arrays, self.engine.regions.sharding(REGION))

    def _all(self, state: AdaptiveState) -> Iterator[tuple[int, Trainer, SyncLoop]]:
        for number, trainer in state.trainers.items():
            yield number, trainer, self.loop(number, trainer.state)

    # -- rounds -----------------------------------------------------------------------------------

    def send_along(self, number: int, trainer: Trainer) -> None:
        """Let the trainer's next payload carry what this region has measured in the round."""
        carrier = self.loop(number, trainer.state).carrier
        carrier.header = self._header(trainer.measured)
        self._counted.pop(number, None)

    def land(
        self, state: AdaptiveState, events: dict[int, list[Event]], stoppable: bool
    ) -> AdaptiveState:
        """Land what all trainers have sent, once all of it is here.

        Args:
          events: get those of every trainer.
          stoppable: whether `RemoteExchange.stop_when` stops the wait; the state is then `paused`,
            and this is called again.
        """
        if not self._arrive(state, stoppable):
            return state
        for number, trainer, loop in self._all(state):
            own = trainer.state
            with loop.carrier.ending(loop, own):
                own = loop.go_on(own, np.ones(1, bool))
            events.setdefault(number, []).extend(loop.owed)
            loop.owed = []
            state = state.with_trainer(number, trainer.replace(state=own))
        return state

    def _arrive(self, state: AdaptiveState, stoppable: bool) -> bool:
        """Wait for the payloads of all trainers, also while the store is away; False = stopped."""
        jax.block_until_ready([trainer.state.inner.params for trainer in state.trainers.values()])
        # All at once, although they land one by one: their deadlines run at the same time.
        flying = [name for _, _, loop in self._all(state) for name in loop.carrier.flying]
        exchange = self.carrier.exchange
        while flying and not exchange.arrives(flying):
            if exchange.stopped():
                return not stoppable  # else the landing waits, with its deadline
            time.sleep(_POLL_SECONDS)
        return True

    def heard(self, number: int) -> dict[str, np.ndarray] | None:
        """What the regions that were counted in a trainer's last exchange have measured.

        None where none of these has. What is read here is not given again.
        """
        if (counted := self._counted.pop(number, None)) is None:
            return None
        values_N = {name: np.asarray(x)[:, 0] for name, x in counted.header.items()}
        return of_counted(values_N, counted.counted_N)

    def rounds_missed(self, state: AdaptiveState, period: int) -> int:
        """Whole rounds that the other jobs have landed beyond this state, at the end of a round."""
        if state.step % period:
            return 0
        return max(0, self.carrier.exchange.frontier() - state.step) // period

    # -- the other jobs ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def listening(self, state: AdaptiveState) -> Iterator[None]:
        """While entered, trainers take what the others exchange, and send nothing."""
        with contextlib.ExitStack() as entered:
            for _, _, loop in self._all(state):
                entered.enter_context(loop.carrier.acting(sends=False))
            yield

    def passed_over(self, state: AdaptiveState) -> bool:
        """Whether the others go on without this region in the next exchange of any trainer."""
        sends = int(state.counters.sends.sum())
        return any([x.carrier.passed_over(sends) for _, _, x in self._all(state)])

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
        loop.carrier.compare_final_anchors(loop, trainer.state)


@given.register(AdaptiveState)
def _given_of_trainers(state: AdaptiveState, method: Method) -> State:
    """Of several trainers: (step, arrays by name, document)."""
    arrays: dict[str, np.ndarray] = {}
    for number, trainer in state.trainers.items():
        _, own, _ = given(trainer.state, method)
        arrays |= {trainer_prefix(number) + name: x for name, x in own.items()}
    return state.step, arrays, {"in_flight": [], "trainers": state.as_document()}
