"""When a signal stops a run: at once, or, with one job per region, at a step all jobs agree on.

Jobs that stopped just anywhere would leave payloads behind that the others wait for. All stop where
the next payload lands of the first one that heard of it: nobody can be past that without it, so all
are at the same step, and the run continues as if it had never stopped. Who trained on while the
others could not be reached may be past it: there it is the next one of the furthest that is known,
or, where what has landed decides when that is, a whole round past it.
Pairs wait for one another only: there it is two rounds past the furthest. One that has got past
that nevertheless stops later, alone.
"""

from __future__ import annotations

import itertools

import numpy as np

from experiments.train.assemble import Run
from lowcomm_jax.interrupt import Interrupt
from lowcomm_jax.runtime.errors import StoreUnavailable
from lowcomm_jax.state.train_state import TrainState


class Stopping:
    """Whether a run is to stop."""

    def __init__(self, run: Run, interrupt: Interrupt):
        self._run, self._interrupt = run, interrupt
        self._last: int | None = None
        self._begun = False

    def at(self, step: int, state: TrainState) -> bool:
        """Whether `step` is the last one.

        Args:
          step: inner steps done, or about to be done with what has been handed out.
          state: not later than that.
        """
        if not self._interrupt.requested:
            return False
        if self._run.exchange is None:
            return True
        if self._last is None:
            try:
                self._last = self._agree(step, state)
            except StoreUnavailable:
                return False  # asked again after the next steps
        return step >= self._last

    def begins(self) -> bool:
        """Whether the run goes on for a while after a signal; true once, so that it is saved."""
        begins = self._interrupt.requested and not self._begun
        self._begun = self._begun or begins
        return begins

    def _agree(self, step: int, state: TrainState) -> int:
        """The step that all stop at; what was agreed on for an earlier one is over."""
        proposal = {"step": self._next_landing(step, state)}
        for number in itertools.count():
            agreed = self._run.exchange.agree(f"stop/{number}", proposal)["step"]
            if agreed >= step:
                return agreed

    def _next_landing(self, step: int, state: TrainState) -> int:
        """Where the first payload lands that is sent after `step`."""
        loop = self._run.engine.sync_loop(state)
        schedule = loop.schedule
        furthest = max([step, *self._run.exchange.steps().values()])
        if loop.groups(0) is not None:
            return (furthest // schedule.period + 3) * schedule.period
        if furthest > step and not schedule.by_steps:
            return int(furthest + schedule.period + np.max(schedule.delay))
        sent = schedule.next_send(furthest, state.counters)
        # The round that begins with a send can be no longer than that.
        return int(sent + (schedule.period if schedule.land_after_send else np.max(schedule.delay)))
