r"""Which entries of a leaf travel in one exchange of a channel, chosen by a seed that all share.

A leaf of N entries is cut into strata of g = round(1 / p) consecutive entries, and of each stratum
one entry travels. Their number ceil(N / g) is therefore constant, and shapes are static. Every
region computes the same indices, so that none travels. Bands of a leaf of more than 2^31 entries
are as leaves of their own (`exchange.entries`). A rule says which entry of its stratum it is:

=============  ==================================================  =============================
rule           entry of a stratum in exchange k = 0, 1, ...        an entry travels
=============  ==================================================  =============================
`Sampled`      drawn anew, uniform                                 with probability 1 / g
`Shuffled`     (b + a k) mod g, a coprime to g; drawn once         once in g exchanges
`Partitioned`  the same, a and b drawn anew every g exchanges      once in each cycle of g
=============  ==================================================  =============================

The last stratum may be shorter. Where its entry would lie behind the leaf's end, the place in the
payload stays empty. So the entries of that stratum travel as often as all others.

Differs from SPARTA's code, which draws a Bernoulli(p) mask, or keeps a permutation of every tensor.
Here the number of entries does not vary, and two entries of one stratum never travel together. A
permutation is an affine one in each stratum, which needs no memory. p is realised as 1 / g.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Selection(abc.ABC):
    """Base of the rules: one entry of every stratum of `stride` entries travels.

    Attributes:
      whole: whether all entries travel, so that leaves travel as they are.
    """

    whole: ClassVar[bool] = False

    @property
    def stride(self) -> int:
        """g, entries of a stratum."""
        return 1

    def count(self, size: int) -> int:
        """Entries of a leaf of this size that travel in one exchange."""
        return -(-size // self.stride)

    def indices(self, key: jax.Array, number: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
        """Which entries of each flattened leaf travel, int32 `[count]`, rising; traced.

        Args:
          key: random key of the channel.
          number: int32, of the exchange, from 0.
          sizes: N of each leaf. An index of N or more is an empty place.
        """
        counts = [self.count(size) for size in sizes]
        # Drawn for all leaves together: a draw each would be most of the compiled program.
        offsets = jnp.split(self.offsets(key, number, sum(counts)), np.cumsum(counts)[:-1])
        return [
            jnp.arange(count, dtype=jnp.int32) * self.stride + offset
            for count, offset in zip(counts, offsets)
        ]

    @abc.abstractmethod
    def offsets(self, key: jax.Array, number: jax.Array, count: int) -> jax.Array:
        """The chosen entry of each of `count` strata, int32 `[count]`, from 0 to below `stride`."""

    def violations(self) -> list[str]:
        """What is wrong with the settings, one line with its fix each."""
        return []


@dataclasses.dataclass(frozen=True)
class Everything(Selection):
    """All entries, every time."""

    whole: ClassVar[bool] = True

    def offsets(self, key: jax.Array, number: jax.Array, count: int) -> jax.Array:
        del key, number
        return jnp.zeros(count, jnp.int32)


@dataclasses.dataclass(frozen=True)
class Sampled(Selection):
    """One entry of every stratum, drawn anew for every exchange.

    Attributes:
      p: share of the entries, a float from 2^-15 to 0.5.
    """

    p: float

    @property
    def stride(self) -> int:
        return round(1 / self.p)

    def offsets(self, key: jax.Array, number: jax.Array, count: int) -> jax.Array:
        return jax.random.randint(jax.random.fold_in(key, number), (count,), 0, self.stride)

    def violations(self) -> list[str]:
        fits = isinstance(self.p, float) and 1 / _MOST <= self.p <= 0.5
        if fits:
            return []
        return [f"p={self.p!r}: give a share in [{1 / _MOST:.1e}, 0.5], or select everything"]


@dataclasses.dataclass(frozen=True)
class Shuffled(Sampled):
    """Every stratum in an order of its own, which never changes: all entries in g exchanges."""

    def offsets(self, key: jax.Array, number: jax.Array, count: int) -> jax.Array:
        return self._in_order(key, number % self.stride, count)

    def _in_order(self, key: jax.Array, place: jax.Array, count: int) -> jax.Array:
        """The entry at this place of each stratum's order, which is an affine permutation."""
        steps = coprimes(self.stride)
        start_key, step_key = jax.random.split(key)
        start = jax.random.randint(start_key, (count,), 0, self.stride)
        chosen = jax.random.randint(step_key, (count,), 0, len(steps))
        return (start + jnp.asarray(steps)[chosen] * place) % self.stride


@dataclasses.dataclass(frozen=True)
class Partitioned(Shuffled):
    """As `Shuffled`, with new orders after every cycle of g exchanges."""

    def offsets(self, key: jax.Array, number: jax.Array, count: int) -> jax.Array:
        cycle_key = jax.random.fold_in(key, number // self.stride)
        return self._in_order(cycle_key, number % self.stride, count)


_MOST = 2**15  # strides up to which products of two of their numbers are int32


def coprimes(stride: int) -> np.ndarray:
    """Numbers of 1 to `stride` without a common divisor with it, int32."""
    return np.array([a for a in range(1, stride + 1) if math.gcd(a, stride) == 1], np.int32)
