"""When a signal stops a run: at once, or, with several jobs, at a step that all agree on.

A job that stopped at any other step would leave a payload for which the others wait.

- All jobs stop where the next payload lands that the first job with a signal sends. No job can pass
  that step without the payload, so that all stop at one step and lose nothing.
- A region that trained on while it was cut off may be past that step. Then all stop at the next
  landing of the furthest region known. Where landings decide what is sent, they stop a whole round
  past that region.
- With gossip a region waits for its partner only: all stop two rounds past the furthest region.
- A job that has passed the agreed step proposes a new one, and may stop alone.
- Regions at a pace of their own have no steps in common. They stop before a round two periods
  ahead, or a second ahead by the rounds so far, whichever is later.
"""

from __future__ import annotations

import itertools
import math
import time

import numpy as np

from experiments.train.assemble import Run
from lowcomm_jax.interrupt import Interrupt
from lowcomm_jax.state.train_state import TrainState, rounds_landed
from lowcomm_jax.store.errors import StoreUnavailable


class Stopping:
    """Whether a run is to stop.

    One of several jobs is saved first (`begins`): to agree, and then to come to that step, it may
    have to wait.

    Attributes:
      unsaved: whether a signal has come, and nothing was saved since.
    """

    def __init__(self, run: Run, interrupt: Interrupt):
        self._run, self._interrupt = run, interrupt
        self._last: int | None = None
        self._begun = self.unsaved = False
        self._since: tuple[int, float] | None = None  # by rounds: (rounds, seconds) at first

    def at(self, step: int, state: TrainState) -> bool:
        """Whether `step` is the last one.

        Args:
          step: inner steps done, or about to be done with what has been handed out.
          state: not later than that.
        """
        if self._since is None and self._run.job.by_rounds:
            self._since = rounds_landed(state), time.monotonic()
        if not self._interrupt.requested:
            return False
        if self._run.exchange is None:
            return True
        self.unsaved = not self._begun
        if self.unsaved:
            return False
        if self._run.job.by_rounds:
            carrier = self._run.engine.sync_loop(state).carrier
            step = max(carrier.landed, rounds_landed(state))
        if self._last is None:
            try:
                self._last = self._agree(step, state)
            except StoreUnavailable:
                return False  # asked again after the next steps
        return step >= self._last

    def rounds(self, whole: int) -> int:
        """Before which round a learner stops; `whole`: rounds of the run."""
        return whole if self._last is None else min(self._last, whole)

    def begins(self) -> bool:
        """Whether the run goes on for a while after a signal; true once, so that it is saved."""
        if self._run.exchange is None:
            return False
        begins = self._interrupt.requested and not self._begun
        self._begun, self.unsaved = self._begun or begins, False
        return begins

    def in_a_wait(self) -> bool:
        """Whether a wait for the other jobs is to stop, so that the state can be saved."""
        return self._interrupt.here and not self._begun

    def _rounds_a_second(self, landed: int) -> int:
        """So far: nobody waits for anybody, and all must hear of the last round before it lands."""
        first, began_s = self._since
        return math.ceil((landed - first) / max(time.monotonic() - began_s, 1e-3))

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
        if self._run.job.by_rounds:
            return max(step, loop.carrier.newest) + max(
                2 * schedule.rounds_by(schedule.period), self._rounds_a_second(step)
            )
        furthest = max([step, *self._run.exchange.steps().values()])
        if loop.groups(0) is not None:
            return (furthest // schedule.period + 3) * schedule.period
        sent = schedule.next_send(step, state.counters)
        if furthest >= sent and not schedule.by_steps:
            return int(furthest + schedule.period + np.max(schedule.delay))
        sent = schedule.next_send(furthest, state.counters)
        # The round that begins with a send can be no longer than that.
        return int(sent + (schedule.period if schedule.land_after_send else np.max(schedule.delay)))
