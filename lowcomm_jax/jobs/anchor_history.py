"""`AnchorHistory`: digests of the anchors this region has had, for others to compare theirs with.

Regions whose anchors differ must notice before they differ further. So every send carries the
digest of its fragment's anchor in its terms, and newcomers compare whole anchors
(`StateTransfer.anchors_agree`).
"""

from __future__ import annotations

import weakref

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.mesh.arrays import whole
from lowcomm_jax.mesh.offload import unstow
from lowcomm_jax.params.fragments import Fragments, take
from lowcomm_jax.state.train_state import TrainState

_REMEMBERED = 32  # versions

_ODD = (0x9E3779B1, 0x85EBCA77)  # large odd multipliers, so that every bit of an element counts

Anchor = dict[str, jax.Array]

DeviceTerms = dict[str, jax.Array]


class AnchorHistory:
    """Keeps digests of past anchors; they stay on the device until they are read.

    Attributes:
      shared: whether all regions have one anchor. Where each has its own, nothing is compared.
      past: results of `terms`, by `anchor_version`, in their order.
    """

    def __init__(self, shared: bool):
        self.shared = shared
        self.past: dict[str, DeviceTerms] = {}
        self._known: dict[int, tuple[list[weakref.ref], jax.Array]] = {}
        self._combined: tuple[list[jax.Array], jax.Array] | None = None

    def sent(self, anchor: Anchor, fragments: Fragments, p: int) -> DeviceTerms:
        """Terms (`store.terms`) of a send of fragment p: the digest of that fragment's anchor.

        Without the other fragments: one of them may have landed here, while a region that was cut
        off still waits for it.
        """
        return {"anchor": self._digest(anchor, fragments, p)} if self.shared else {}

    def terms(self, anchor: Anchor, fragments: Fragments) -> DeviceTerms:
        """The terms of a whole anchor: equal in all regions that have the same `anchor_version`.

        Of the same arrays they are the same array, which is computed by then: nobody waits anew.
        """
        if not self.shared:
            return {}
        digests = [self._digest(anchor, fragments, p) for p in range(len(fragments))]
        known, digest = self._combined or ([], None)
        if digest is None or list(map(id, known)) != list(map(id, digests)):
            digest = combined_digest(digests)
            self._combined = digests, digest
        return {"anchor": digest}

    def _digest(self, anchor: Anchor, fragments: Fragments, p: int) -> jax.Array:
        """Digest of fragment p, computed once for the same arrays."""
        leaves = fragments.leaves(anchor, p)
        known, digest = self._known.get(p, ([], None))
        same = len(known) == len(leaves) and all(x() is y for x, y in zip(known, leaves.values()))
        if same and digest is not None:
            return digest
        digest = whole(fragment_digest(leaves, fragments.rows(p)))
        # Not the arrays themselves, which would outlive a state that is replaced.
        self._known[p] = [weakref.ref(x) for x in leaves.values()], digest
        return digest

    def forget(self) -> None:
        """Forget the past: another region's state takes the place of this one's."""
        self.past = {}

    def note(self, state: TrainState, fragments: Fragments) -> None:
        """Remember the digest of this state's anchor."""
        if not self.shared:
            return
        self.past[anchor_version(state)] = self.terms(state.anchor, fragments)
        if len(self.past) > _REMEMBERED:
            del self.past[next(iter(self.past))]


def anchor_version(state: TrainState) -> str:
    """What has landed in an anchor; equal versions mean that the same payloads have.

    It has the number of landings of every fragment: payloads land in the order of sends.
    """
    landed = state.counters.sends.copy()
    for flight in state.in_flight.values():
        landed[int(flight.fragment)] -= not flight.anchor_updated
    return ".".join(map(str, landed))


@jax.jit
def fragment_digest(leaves: dict[str, jax.Array], rows: dict[str, jax.Array]) -> jax.Array:
    """Digest of a fragment's anchor, uint32 `[2]`, equal where all bits are.

    Two sums modulo 2^32 over all elements of (bits + position) mixed with a multiplier: any single
    element that differs changes them. Integer sums do not depend on their order, so that the
    digest is the same on every mesh. The digest guards against accidents, not against forgery.

    Args:
      leaves: float32 by name, `[A, ...]`; rows: see `Fragments.rows`.
    """
    total = jnp.zeros(2, jnp.uint32)
    for number, name in enumerate(sorted(leaves)):
        # One at a time, where they are offloaded.
        leaf = take({name: unstow(leaves[name])}, rows)[name]
        total = total + _leaf_digest(leaf, np.uint32(number * _ODD[1] & 0xFFFFFFFF))
    return total


@jax.jit
def _leaf_digest(leaf: jax.Array, first: np.uint32) -> jax.Array:
    """One leaf's part of a digest, uint32 `[2]`; traced once for all leaves of a shape.

    Args:
      first: position of its first element.
    """
    bits = jax.lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32)
    place = _places(bits.shape) + first
    return jnp.stack([jnp.sum(_mixed(bits, place, odd), dtype=jnp.uint32) for odd in _ODD])


@jax.jit
def combined_digest(digests: list[jax.Array]) -> jax.Array:
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
