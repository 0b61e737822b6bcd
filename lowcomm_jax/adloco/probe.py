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

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.adloco.history import Told
from lowcomm_jax.adloco.state import SCALARS, AdaptiveState
from lowcomm_jax.engine import Engine
from lowcomm_jax.exchange import all_gather
from lowcomm_jax.history import Event, readable
from lowcomm_jax.mesh.offload import unstow
from lowcomm_jax.state.train_state import TrainState
from lowcomm_jax.sync.initial_state import anchor_axis
from lowcomm_jax.sync.round_programs import RoundPrograms
from lowcomm_jax.train import batch_blocks
from lowcomm_jax.train.batch_blocks import BlockStager, batch_size
from lowcomm_jax.train.inner_step import mean_over_microbatches, part_key, step_key

PyTree = Any


class Probe:
    """Measures gradients of an engine's regions.

    Args:
      engine: whose loss, regions and mesh are used.
      count: M, microbatches of each region.
    """

    def __init__(self, engine: Engine, count: int):
        self.engine = engine
        self.count = count
        self._programs: dict[Any, Any] = {}

    def measure(self, state: TrainState, batch: PyTree, microbatch: int) -> dict[str, jax.Array]:
        """Start a measurement at the anchor; nothing waits for it.

        Args:
          state: is only read.
          batch: host batch of M microbatches, leaves `[R, M * microbatch, ...]`.
          microbatch: m, samples of a microbatch that the engine can run; another m compiles
            (`warm`).

        Returns:
          float32 `[R]` by name, for `rules.batching.pooled`.

        Raises:
          ValueError: a batch of another size.
        """
        needed, size = self.count * microbatch, batch_size(batch)
        if size != needed:
            raise ValueError(
                f"a probe of {self.count} microbatches of {microbatch} needs {needed} samples a "
                f"region, the batch has {size}"
            )
        block = BlockStager([batch], self.count, microbatch).take(1)
        if state.layout not in self._programs:
            programs = self.engine.sync_loop(state).programs
            self._programs[state.layout] = jax.jit(make_probe_program(programs))
        values_R = self._programs[state.layout](
            state.anchor,
            state.inner.buffers,
            state.inner.step,
            state.frozen,
            self.engine.place(block.batches, cut=True),
            self.engine.region_keys,
        )
        return readable(values_R)

    def warm(self, state: TrainState, batch: PyTree, sizes: Sequence[int]) -> None:
        """Compile for microbatches of `sizes`; runs each once. `batch` as in `Engine.warm`."""
        for size in sizes:
            self.measure(state, batch_blocks.repeated(batch, self.count * size), size)

    def samples(self, microbatch: int) -> int:
        """Samples of a region that go forward and backward per measurement, both passes."""
        return 2 * self.count * microbatch


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
    step, gathered = state.step, Told()
    traffic = all_gather(4 * len(SCALARS), mask_R)
    sends_R = traffic.sent > 0
    send = Event.of_send(step, -1, f"probe@{step}", sends_R, traffic, {})
    land = Event.of_landing(step, -1, send.key, sends_R, 0, {})
    for number, trainer in state.trainers.items():
        if trainer.measured is not None:
            gathered.add(number, [send, land] if sends_R.any() else [])
            told.hear(number, trainer.measured, mask_R)
            own = trainer.state.with_more_bytes(traffic.sent, traffic.received)
            state = state.with_trainer(number, trainer.replace(state=own))
    told.events[:0] = gathered.events
    return state


def make_probe_program(programs: RoundPrograms):
    """Build the program of a measurement, not yet jitted.

    Returns:
      `(anchor, buffers, step_R, frozen, batches, region_keys) -> {name: float32 [R]}` with batch
      leaves `[R, M, m, ...]`.
    """
    step, anchor_in = programs.step, 0 if anchor_axis(programs)[1] else None
    dtypes = {name: like.dtype for name, like in step.layout.train_shapes().items()}

    def gradients(anchor, buffers, at, frozen, batches, region_key):
        """`j -> (fp32 gradient, tokens)` of microbatch j, and how many there are."""
        first = unstow(anchor)
        point = first if anchor_in == 0 else jax.tree.map(lambda x: x[0], first)
        params = {k: x.astype(dtypes[k]) for k, x in point.items()}
        rng = step_key(region_key, at)

        def one(j):
            batch = jax.tree.map(lambda x: x[j], batches)
            key = part_key(rng, j)
            grads, _, metrics = step.gradients(params, buffers, frozen, batch, key)
            return {k: g.astype(jnp.float32) for k, g in grads.items()}, metrics["tokens"]

        return one, jax.tree.leaves(batches)[0].shape[0]

    def mean(*given):
        one, count = gradients(*given)
        return mean_over_microbatches(lambda j, kept: (*one(j), kept), {}, count)[0]

    def spread(gbar, *given):
        one, count = gradients(*given)
        gbar2 = _inner(gbar, gbar)
        scale = jnp.where(gbar2 > 0, 1.0 / jnp.where(gbar2 > 0, gbar2, 1.0), 0.0)

        def deviation(j, kept):
            grads, tokens = one(j)
            away = jax.tree.map(jnp.subtract, grads, gbar)
            return (_inner(away, away), _inner(away, gbar) ** 2 * scale), tokens, kept

        total, along = mean_over_microbatches(deviation, {}, count)[0]
        return dict(zip(SCALARS, (gbar2, total * count, along * count)))

    given_in = (anchor_in, 0, 0, None, 0, 0)
    return programs.regions.lift(lambda *given: spread(mean(*given), *given), given_in)


def _inner(a: dict[str, jax.Array], b: dict[str, jax.Array]) -> jax.Array:
    return sum((jnp.sum(a[k] * b[k]) for k in sorted(a)), jnp.float32(0))
