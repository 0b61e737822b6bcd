"""When a signal stops a run: at once, or, with one job per region, at a step all jobs agree on.

Jobs that stopped just anywhere would leave payloads behind that the others wait for. All stop where
the first one that heard of it has made its next send: nobody needs more of it up to there, and the
run continues as if it had never stopped.
"""

from __future__ import annotations

from experiments.assemble import Run
from lowcomm_jax.exchange import StoreUnavailable
from lowcomm_jax.interrupt import Interrupt
from lowcomm_jax.state import TrainState


class Stopping:
    """Whether a run is to stop."""

    def __init__(self, run: Run, interrupt: Interrupt):
        self._run, self._interrupt = run, interrupt
        self._last: int | None = None

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
            schedule = self._run.engine.trips(state).schedule
            proposed = schedule.next_send(step, state.clock)
            try:
                self._last = self._run.exchange.agree("stop", {"step": int(proposed)})["step"]
            except StoreUnavailable:
                return False  # asked again after the next steps
        return step >= self._last
