"""`Probe`: measures how far microbatch gradients spread, for batch policies (`rules.batching`).

The measured microbatches are the first samples of the round, which the trainer then trains on: a
measurement costs compute and no data. Its decision is for the next round, so that the scalars
travel with the round's own exchange.

The measurement is a program of its own, without cost for inner steps. All gradients are taken at
one point, the anchor, and in two passes: the mean, then the deviations from it. In one pass, as
||g_j||^2 - ||gbar||^2, the difference would be lost to fp32 rounding. A measurement of M
microbatches costs a region 2 M forward and backward passes. As in training, microbatches count by
their tokens (`rules.batching` has the weights).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.adloco.history import Told
from lowcomm_jax.adloco.state import AdaptiveState
from lowcomm_jax.engine import Engine
from lowcomm_jax.exchange import all_gather
from lowcomm_jax.history import Event, readable
from lowcomm_jax.mesh.offload import unstow
from lowcomm_jax.state.train_state import TrainState
from lowcomm_jax.sync.initial_state import anchor_axis
from lowcomm_jax.sync.round_programs import RoundPrograms
from lowcomm_jax.train import batch_blocks
from lowcomm_jax.train.batch_blocks import BlockStager
from lowcomm_jax.train.inner_step import mean_over_microbatches, part_key, step_key

PyTree = Any


class Probe:
    """Measures gradients of an engine's regions.

    Args:
      engine: whose loss, regions and mesh are used.
      count: M, microbatches of each region; 0 = nothing is measured.
    """

    def __init__(self, engine: Engine, count: int):
        self.engine = engine
        self.count = count
        self._program = functools.cache(
            lambda layout: jax.jit(make_probe_program(engine.programs_for(layout)))
        )

    def measure(
        self, state: TrainState, batch: PyTree, microbatch: int, counts_R: np.ndarray
    ) -> jax.Array:
        """Start a measurement at the anchor; nothing waits for it.

        Args:
          state: is only read.
          batch: host batch of M microbatches, leaves `[R, M * microbatch, ...]`.
          microbatch: m, samples of a microbatch that the engine can run; another m compiles
            (`warm`).
          counts_R: bool, whose measurement counts.

        Returns:
          float32 `[R, 4]`, the `Noise` of every region.
        """
        block = BlockStager([batch], self.count, microbatch).take(1)
        measured_Rx4 = self._program(state.layout)(
            state.anchor,
            state.inner.buffers,
            state.inner.step,
            state.frozen,
            self.engine.place(block.batches, cut=True),
            self.engine.region_keys,
            counts_R.astype(np.float32),
        )
        return readable(measured_Rx4)

    def warm(self, state: TrainState, batch: PyTree, sizes: Sequence[int]) -> None:
        """Compile for microbatches of `sizes`; runs each once. `batch` as in `Engine.warm`."""
        nobody = np.zeros(self.engine.regions.count, bool)
        for size in sizes:
            self.measure(state, batch_blocks.repeated(batch, self.count * size), size, nobody)


def booked(state: AdaptiveState, mask_R: np.ndarray, told: Told) -> AdaptiveState:
    """Let all regions of one program hear what they have measured in a round, and book it.

    They are three fp32 scalars a region and trainer.

    Args:
      mask_R: bool, whose scalars travel.
      told: hears them, and gets a send and a landing for each trainer, before what it has of the
        round. They are of fragment -1, since they carry none. No events where a region is alone.

    Returns:
      The state whose counters have these bytes.
    """
    traffic = all_gather(12, mask_R)
    sends_R = traffic.sent > 0
    send = Event.of_send(state.step, -1, f"probe@{state.step}", sends_R, traffic, {})
    land = Event.of_landing(state.step, -1, send.key, sends_R, 0, {})
    others, told.events = told.events, []
    for number, trainer in state.trainers.items():
        if trainer.measured is not None:
            told.add(number, [send, land] if sends_R.any() else [])
            told.hear(number, trainer.measured, mask_R)
            own = trainer.state.with_more_bytes(traffic.sent, traffic.received)
            state = state.with_trainer(number, trainer.replace(state=own))
    told.events += others
    return state


def make_probe_program(programs: RoundPrograms):
    """Build the program of a measurement, not yet jitted.

    Returns:
      `(anchor, buffers, step_R, frozen, batches, region_keys, counts_R) -> float32 [R, 4]` with
      batch leaves `[R, M, m, ...]`, and float32 counts.
    """
    step, anchor_in = programs.step, 0 if anchor_axis(programs)[1] else None
    dtypes = {name: like.dtype for name, like in step.layout.train_shapes().items()}

    def measured(anchor, buffers, at, frozen, batches, region_key, counts):
        first = unstow(anchor)
        point = first if anchor_in == 0 else jax.tree.map(lambda x: x[0], first)
        params = {k: x.astype(dtypes[k]) for k, x in point.items()}
        rng, count = step_key(region_key, at), jax.tree.leaves(batches)[0].shape[0]

        def mean_of(value):
            """The mean over microbatches of a function of their fp32 gradients."""

            def one(j, kept):
                batch, key = jax.tree.map(lambda x: x[j], batches), part_key(rng, j)
                grads, _, metrics = step.gradients(params, buffers, frozen, batch, key)
                wide = {k: g.astype(jnp.float32) for k, g in grads.items()}
                return value(wide), metrics["tokens"], kept

            return mean_over_microbatches(one, {}, count)[0]

        gbar = mean_of(lambda grads: grads)
        gbar2 = _inner(gbar, gbar)
        scale = jnp.where(gbar2 > 0, 1.0 / jnp.where(gbar2 > 0, gbar2, 1.0), 0.0)

        def deviation(grads):
            away = jax.tree.map(jnp.subtract, grads, gbar)
            return _inner(away, away), _inner(away, gbar) ** 2 * scale

        total, along = mean_of(deviation)
        return jnp.stack([gbar2, total * count, along * count, counts])

    return programs.regions.lift(measured, (anchor_in, 0, 0, None, 0, 0, 0))


def _inner(a: dict[str, jax.Array], b: dict[str, jax.Array]) -> jax.Array:
    return sum((jnp.sum(a[k] * b[k]) for k in sorted(a)), jnp.float32(0))
