"""Books bytes that a loss function moves between regions in a step (random pipeline routing)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.exchange import Traffic
from lowcomm_jax.history import Event
from lowcomm_jax.mesh.pipeline_paths import Hop
from lowcomm_jax.state.train_state import TrainState
from lowcomm_jax.train.inner_step import keys_of_regions, part_key, step_key

PyTree = Any
HopsFn = Callable[[PyTree, jax.Array], list[list[Hop]]]
CHUNK = 256  # steps drawn at once: a draw waits its turn on the device's queue


def route_event(step: int, hops: list[Hop], regions: int) -> Event:
    """The transfers between regions of one inner step."""
    moved_R = np.zeros(regions, np.int64)
    for hop in hops:
        for way in hop.ways:  # a region that is sent something sends as much
            moved_R += hop.nbytes * (np.array(way) != np.arange(regions))
    traffic = Traffic("pass", int(moved_R.max()), moved_R, moved_R.copy())
    event = Event.of_send(step, -1, None, np.ones(regions, bool), traffic, {})
    return dataclasses.replace(event, kind="route", hops=tuple(hops))


class RoutedSteps:
    """The transfers of every inner step: a pure function of (seed, step, shapes of the batch)."""

    def __init__(self, hops: HopsFn, seed: int, accumulate: int, regions: int):
        """`hops`: see `Engine`; `accumulate`: microbatches, calls of the loss function a step."""
        self._hops = hops
        self._accumulate = accumulate
        self._regions = regions
        self._keys = functools.partial(_keys, keys_of_regions(seed, [0])[0], parts=accumulate)
        self._drawn: tuple[Any, list[list[Hop]]] = (None, [])

    def book(self, state: TrainState, steps: range, batches: PyTree, events: list[Event]):
        """Count the transfers of these steps; `batches` are staged, `[R, S, b, ...]`.

        Returns:
          (state, events): the events of the transfers come first.
        """
        shapes = jax.tree.map(self._one, batches)
        found = [route_event(t, self._at(t, shapes), self._regions) for t in steps]
        for event in found:
            state = state.with_more_bytes(event.bytes_sent, event.bytes_received)
        return state, [*found, *events]

    def _at(self, step: int, shapes: PyTree) -> list[Hop]:
        chunk, place = divmod(step - 1, CHUNK)
        leaves, treedef = jax.tree.flatten(shapes)
        wanted = (chunk, treedef, tuple((x.shape, x.dtype) for x in leaves))
        if self._drawn[0] != wanted:
            self._drawn = wanted, self._hops(shapes, self._keys(chunk * CHUNK))
        first = place * self._accumulate
        return [hop for hops in self._drawn[1][first : first + self._accumulate] for hop in hops]

    def _one(self, x: Any) -> jax.ShapeDtypeStruct:
        """Shape of a batch leaf as one region's loss function gets it."""
        return jax.ShapeDtypeStruct((x.shape[2] // self._accumulate, *x.shape[3:]), x.dtype)


@functools.partial(jax.jit, static_argnames="parts")
def _keys(key: np.ndarray, first: jax.Array, *, parts: int) -> jax.Array:
    """Region 0's keys of the steps from `first` (0-based) on, every part's, `[CHUNK * parts]`."""

    def of_step(step):
        rng = step_key(key, step)
        return rng[None] if parts == 1 else jax.vmap(lambda i: part_key(rng, i))(jnp.arange(parts))

    return jax.vmap(of_step)(first + jnp.arange(CHUNK)).reshape(-1)
