"""Which anchor this region has had when, for others to compare theirs with."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.mesh.arrays import fetch, whole
from lowcomm_jax.mesh.leader import leader
from lowcomm_jax.mesh.offload import unstow
from lowcomm_jax.params.fragments import Fragments, take
from lowcomm_jax.state.leaves import flight_records, named_leaves, saved_name
from lowcomm_jax.state.train_state import TrainState

if TYPE_CHECKING:
    from lowcomm_jax.runtime.connect import JobExchange


# -- shared ------------------------------------------------------------------------------------
#
# What the regions of a run have in common: all that a newcomer needs.


SHARED = ("anchor", "outer", "rate", "bases")  # fields of a state, besides the counters


def describe(state: TrainState) -> tuple[int, dict[str, np.ndarray], dict]:
    """What a newcomer needs: (step, arrays by name, what is in flight).

    The arrays are there in the first process of a job only.
    """
    named: dict[str, Any] = {}
    for field in (*SHARED, "counters"):
        named |= named_leaves(saved_name(field), getattr(state, field))
    arrays = fetch(named, here=leader().leads)
    return int(state.counters.step), arrays, {"in_flight": flight_records(state)}


def moment(state: TrainState) -> tuple[int, str]:
    """(step, name): of the same name are only states in which the same payloads have landed.

    Of every fragment as many, that is: they land in the order in which they were sent.
    """
    landed = state.counters.sends.copy()
    for flight in state.in_flight.values():
        landed[int(flight.fragment)] -= not flight.anchor_updated
    return int(state.counters.step), ".".join(map(str, landed))


def give(exchange: JobExchange, state: TrainState) -> None:
    """Give the state to those who ask for one, if that is this region's to do."""
    if exchange.owes_state():
        exchange.give_state(*describe(state))


# -- digest ------------------------------------------------------------------------------------
#
# Anchor digests: jobs whose anchors have parted must notice before they part further.


_ODD = (0x9E3779B1, 0x85EBCA77)  # large odd multipliers, so that every bit of an element counts


@jax.jit
def fragment_digest(leaves: dict[str, jax.Array], rows: dict[str, jax.Array]) -> jax.Array:
    """Digest of a fragment's anchor, uint32 `[2]`, equal where all bits are.

    Two sums modulo 2^32 over all elements of (bits + position) mixed with a multiplier: any single
    element that differs changes them. Integer sums do not depend on their order, so that the
    digest is the same on every mesh. It guards against accidents, not against forgery.

    Args:
      leaves: float32 by name, `[A, ...]`; rows: see `Fragments.rows`.
    """
    total = jnp.zeros(2, jnp.uint32)
    for number, name in enumerate(sorted(leaves)):
        # One at a time, where they are offloaded.
        leaf = take({name: unstow(leaves[name])}, rows)[name]
        bits = jax.lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32)
        place = _places(bits.shape) + jnp.uint32(number * _ODD[1] & 0xFFFFFFFF)
        sums = [jnp.sum(_mixed(bits, place, odd), dtype=jnp.uint32) for odd in _ODD]
        total = total + jnp.stack(sums)
    return total


@jax.jit
def together(digests: list[jax.Array]) -> jax.Array:
    """One digest of those of all fragments, in their order, uint32 `[2]`."""
    numbers = jnp.arange(len(digests), dtype=jnp.uint32)[:, None]
    return jnp.sum(_mixed(jnp.stack(digests), numbers, _ODD[0]), 0, jnp.uint32)


def _places(shape: tuple[int, ...]) -> jax.Array:
    """Row-major number of every element modulo 2^32, uint32; without a reshape, which would gather
    leaves that are sharded inside a region."""
    place, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        along = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        place = place + along * jnp.uint32(stride & 0xFFFFFFFF)
        stride *= shape[axis]
    return place


def _mixed(bits: jax.Array, place: jax.Array, odd: int) -> jax.Array:
    """One to one in `bits` for a given place: adding, multiplying by an odd number and folding the
    high bits into the low ones can all be undone."""
    x = (bits + place * jnp.uint32(_ODD[0])) * jnp.uint32(odd)
    return (x ^ (x >> 15)) * jnp.uint32(_ODD[1])


_REMEMBERED = 32  # steps with sends or landings
Anchor = dict[str, jax.Array]
Terms = dict[str, jax.Array]


class AnchorHistory:
    """Remembers digests of the anchor, which stay on the device until somebody asks.

    Attributes:
      shared: all regions have one anchor, not each its own, of which there is nothing to compare.
      past: what `terms` gave, by `shared.moment`, ascending.
    """

    def __init__(self, shared: bool):
        self.shared = shared
        self.past: dict[tuple[int, str], Terms] = {}
        self._known: dict[int, tuple[list[weakref.ref], jax.Array]] = {}

    def sent(self, anchor: Anchor, fragments: Fragments, p: int) -> Terms:
        """What all regions must have alike where fragment p leaves (`exchange.between.terms`).

        Not of the other fragments: theirs may have landed in one region and still be awaited in
        another, which could not be reached for a while.
        """
        return {"anchor": self._digest(anchor, fragments, p)} if self.shared else {}

    def terms(self, anchor: Anchor, fragments: Fragments) -> Terms:
        """What all regions must have alike of an anchor of which the same has landed."""
        if not self.shared:
            return {}
        return {
            "anchor": together([self._digest(anchor, fragments, p) for p in range(len(fragments))])
        }

    def _digest(self, anchor: Anchor, fragments: Fragments, p: int) -> jax.Array:
        """Computed once, when the fragment's leaves have moved."""
        leaves = fragments.leaves(anchor, p)
        known, digest = self._known.get(p, ([], None))
        if len(known) == len(leaves) and all(x() is y for x, y in zip(known, leaves.values())):
            return digest
        digest = whole(fragment_digest(leaves, fragments.rows(p)))
        # Not the arrays themselves, which would outlive a state that is replaced.
        self._known[p] = [weakref.ref(x) for x in leaves.values()], digest
        return digest

    def forget(self) -> None:
        """What there was is not of the state that comes."""
        self.past = {}

    def note(self, state: TrainState, fragments: Fragments) -> None:
        """Remember this one."""
        if not self.shared:
            return
        # A new one each time: others may be reading the old one on their threads.
        self.past = {**self.past, moment(state): self.terms(state.anchor, fragments)}
        if len(self.past) > _REMEMBERED:
            del self.past[next(iter(self.past))]
