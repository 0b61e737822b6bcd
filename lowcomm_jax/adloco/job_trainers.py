"""The trainers of a job that is one region of several: how they land, and what regions agree on.

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

import time

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.adloco.history import Told
from lowcomm_jax.adloco.state import Noise, Trainer
from lowcomm_jax.engine import Engine
from lowcomm_jax.history import Event
from lowcomm_jax.jobs.job_carrier import Counted
from lowcomm_jax.mesh.arrays import place
from lowcomm_jax.mesh.regions import REGION
from lowcomm_jax.rounds.remote import RemoteExchange
from lowcomm_jax.state.train_state import TrainState
from lowcomm_jax.sync.sync_loop import SyncLoop

_POLL_SECONDS = 0.05


def carry(engine: Engine, number: int, measured: list[Noise] | None, told: Told) -> None:
    """Between jobs, let a trainer's payloads carry what this region has measured of it, or zeros.

    Once they land, `told` hears what all regions have measured. Nothing waits for what a device has
    still to compute, but in a job of several processes.
    """

    def hear(counted: Counted) -> None:
        told.hear(number, counted.header["noise"], counted.counted_N)

    if engine.carrier is not None:
        noise_1x4 = jnp.asarray([(0, 0, 0, 0)] if measured is None else measured, jnp.float32)
        engine.carrier.header = place({"noise": noise_1x4}, engine.regions.sharding(REGION))
        engine.carrier.witness = hear


def wait_for_payloads(
    exchange: RemoteExchange, loops: list[tuple[int, Trainer, SyncLoop]], stoppable: bool
) -> bool:
    """Wait for the payloads of all trainers, also while the store is away; False = stopped.

    Args:
      loops: of all trainers.
      stoppable: whether `RemoteExchange.stop_when` stops the wait.
    """
    jax.block_until_ready([trainer.state.inner.params for _, trainer, _ in loops])
    # All at once, although they land one by one: their deadlines run at the same time.
    flying = [name for _, _, loop in loops for name in loop.carrier.flying]
    while flying and not exchange.arrives(flying):
        if exchange.stopped():
            return not stoppable  # else the landing waits, with its deadline
        time.sleep(_POLL_SECONDS)
    return True


def land(loop: SyncLoop, state: TrainState) -> tuple[TrainState, list[Event]]:
    """A trainer's training state once what its paused step waits for has landed, and events."""
    with loop.carrier.ending(loop, state):
        state = loop.go_on(state, np.ones(1, bool))
    owed, loop.owed = loop.owed, []
    return state, owed
