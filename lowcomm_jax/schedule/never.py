"""No main exchange: a method of channels alone (`lowcomm_jax.channels`)."""

from __future__ import annotations

import dataclasses

from lowcomm_jax.schedule.base import Schedule, Send
from lowcomm_jax.state.train_state import SyncCounters


@dataclasses.dataclass(frozen=True)
class Never(Schedule):
    """No pseudo-gradient is sent, and there is no anchor.

    The model is then the mean of the regions (`global_params`); `Engine.finish` sets all regions to
    it.
    """

    period: int = 1
    fragments: int = 1
    delay: int = 0
    by_steps = never_sends = True

    def due(self, step: int, counters: SyncCounters) -> tuple[Send, ...]:
        del step, counters
        return ()

    def violations(self, regions: int) -> list[str]:
        del regions
        return []
