"""A codec codes units of a grid: one pair of functions of arrays, which never sees a device.

`UnitCodec.encode` gets the matrices of a leaf cut into units, fp32 `[L, down, across, height,
width]` (`grid`). It returns arrays `[L, down, across, ...]`, one entry a unit, or `[L, 1, 1, ...]`,
one a matrix. What it needs to know of a whole matrix it asks `Matrix.total`. Where units lie on the
devices of a region, error feedback, stacks too large to code at once, values that are not finite
and absent regions belong to who calls it (`compression.PerTensor`).

A new codec is a file in `codecs` with a subclass and its `NAMES`.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from lowcomm_jax.compression.grid import Unit
from lowcomm_jax.compression.means import as_rounded

SMALLEST = 1e-36  # below, a reciprocal overflows fp32; such values are sent as zero
_TOGETHER = 1024  # units whose sums a CPU keeps side by side, in its cache
Payload = dict[str, jax.Array]


class Matrix(NamedTuple):
    """What a codec may ask about the matrices that its units belong to.

    Attributes:
      total: `x [L, down, across, ...] -> [L, 1, 1, ...]`: sum over all units of each matrix, in an
        order that does not depend on devices. Where the unit says that rows are `apart`, it is the
        sum over those of each row, `[L, down, 1, ...]`.
      largest: likewise, the largest value, of values that are not negative.
      real: bool `[1, down, across, height, width]`, False for padding; None = there is none.
    """

    total: Callable[..., jax.Array]
    largest: Callable[..., jax.Array]
    real: jax.Array | None = None

    @property
    def unpadded(self) -> Matrix:
        """The same for other values of these units, as those that a codec keeps."""
        return self._replace(real=None)

    def counts(self, x: jax.Array) -> jax.Array:
        """Values of each unit, without padding: fp32 `[1, down, across]`."""
        real = jnp.ones((1, 1, 1, *x.shape[3:]), bool) if self.real is None else self.real
        counts = jnp.sum(real.astype(jnp.float32), axis=(3, 4))
        return jnp.broadcast_to(counts, (1, *x.shape[1:3]))

    def filled(self, x: jax.Array) -> jax.Array:
        """x with 0 in the place of padding."""
        return x if self.real is None else jnp.where(self.real, x, 0.0)

    def unit_sums(self, x: jax.Array) -> jax.Array:
        """Sum of each unit by halves, without padding: `[L, down, across]`."""
        return fold(flat(self.filled(x)), 3)[..., 0]

    def class_totals(
        self, x: jax.Array, at: jax.Array, classes: Sequence[int]
    ) -> tuple[jax.Array, jax.Array]:
        """(sums, counts) of the values of each matrix in each class, without padding; see `total`.

        Args:
          x: fp32 `[L, down, across, height, width]`.
          at: the class of each value, uint8; values of other classes are left out.
          classes: their numbers, not all 256.

        Returns:
          fp32 `[L, groups, 1, classes]` each, groups as of `total`. On CPUs, where compilers add in
          an order that depends on the layout, values of a unit are added in its order.
        """
        if self.real is not None:
            nowhere = next(number for number in range(256) if number not in classes)
            at = jnp.where(self.real, at, jnp.uint8(nowhere))
        numbers = jnp.array(classes, jnp.uint8)[:, None]

        def summands(x_U, at_U):
            hit = numbers == at_U[None]
            return jnp.where(hit, x_U[None], 0.0), hit.astype(jnp.float32)

        in_turn = functools.partial(_in_turn, summands)
        at_once = functools.partial(_at_once, classes=classes)
        found = jax.lax.platform_dependent(flat(x), flat(at), cpu=in_turn, default=at_once)
        sums, counts = jnp.split(self.total(jnp.concatenate(found, axis=-1)), 2, axis=-1)
        return sums, counts


class UnitCodec(abc.ABC):
    """Codes the units of a leaf; subclasses are frozen dataclasses.

    A codec states how far a decoded value may be off, and keeps to that on both ways of payloads. A
    unit that holds a value that is not finite comes as NaN, and its floats go out as NaN.

    Attributes:
      requantizable: whether a mean of decoded values may be encoded again, so that a two-shot
        reduction makes sense.
      reads_params: whether `encode` is given the weights that the values would change, fp32: those
        that a pseudo-gradient is measured against, as they are at the send. Such a codec travels
        whole, and never in slices that are encoded again.
    """

    requantizable: ClassVar[bool] = True
    reads_params: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Short label for tables."""

    @property
    @abc.abstractmethod
    def unit(self) -> Unit:
        """The largest unit; 1 x 1 = every value by itself."""

    @abc.abstractmethod
    def encode(self, x: jax.Array, matrix: Matrix, params: jax.Array | None = None) -> Payload:
        """Payload of fp32 units `[L, down, across, height, width]`; params: weights cut alike."""

    @abc.abstractmethod
    def decode(self, payload: Payload, unit: tuple[int, int]) -> jax.Array:
        """The values, fp32 `[L, down, across, *unit]`.

        Arrays of a matrix may also come with an entry for each row or column of the grid.
        """

    def summands(
        self, payload: Payload, unit: tuple[int, int]
    ) -> tuple[jax.Array, jax.Array | None]:
        """(values, weights) of one region in the domain in which means are taken (`finish`).

        Weights `None` = all 1: the mean is over the regions, and not over those who sent a value.
        """
        return self.decode(payload, unit), None

    def finish(self, mean: jax.Array) -> jax.Array:
        """From the domain in which means are taken to values."""
        return mean

    def sends_all(self, unit: tuple[int, int]) -> bool:
        """Whether a codec that is meant to choose would send every value of such units."""
        del unit
        return False


def not_of_units(name: str, codec: Any) -> str | None:
    """Why a setting is no codec that another one codes values with; None = it is."""
    if not isinstance(codec, UnitCodec):
        return f"{name}={codec!r}: give a compression.UnitCodec, or the name of one"
    if codec.reads_params:
        return f"{name}={codec.name}: it compares values with the weights: give another codec"
    return None


def fold(x: jax.Array, axis: int) -> jax.Array:
    """Sum over one axis, which keeps length 1, in an order that the compiler cannot change."""
    while (n := x.shape[axis]) > 1:
        low, high, rest = jnp.split(x, [n // 2, n // 2 * 2], axis)
        x = jnp.concatenate([low + high, rest], axis) if n % 2 else low + high
    return x


def reciprocal(x: jax.Array) -> jax.Array:
    """1 / x for x >= 1e-36, else 0 (instead of inf); NaN for NaN."""
    large = ~(x < SMALLEST)
    return jnp.where(large, 1.0 / jnp.where(large, x, 1.0), 0.0)


def largest_magnitude(x: jax.Array) -> jax.Array:
    """max |x| over the last axis (from both ends: CPU compilers fuse those faster than |x|)."""
    return jnp.maximum(jnp.max(x, axis=-1), -jnp.min(x, axis=-1))


def flat(x: jax.Array) -> jax.Array:
    """Units as rows, `[L, down, across, height * width]`."""
    return x.reshape(*x.shape[:3], -1)


def _at_once(x: jax.Array, at: jax.Array, classes: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    hits = [at == number for number in classes]
    sums = [jnp.sum(jnp.where(hit, x, 0.0), axis=-1) for hit in hits]
    counts = [jnp.sum(hit.astype(jnp.float32), axis=-1) for hit in hits]
    return jnp.stack(sums, -1), jnp.stack(counts, -1)


def _in_turn(summands: Callable[..., Any], *given: jax.Array) -> Any:
    """Sums over the last axis of what `summands` makes of values: `[U]` each to `[..., U]`.

    Value after value, of some units side by side: elementwise, for a CPU's vector units.
    """
    *lead, width = given[0].shape
    units = math.prod(lead)
    bands = max(-(-units // _TOGETHER), 1)
    together = -(-units // bands)
    missing = ((0, bands * together - units), (0, 0))
    cut = (jnp.pad(v.reshape(units, width), missing) for v in given)

    def one(given):
        columns = tuple(v.T for v in given)

        def add(i, sums):
            return jax.tree.map(jnp.add, sums, summands(*(v[i] for v in columns)))

        like = jax.eval_shape(summands, *(v[0] for v in columns))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), like)
        return jax.tree.map(jnp.transpose, jax.lax.fori_loop(0, width, add, zeros))

    sums = jax.lax.map(one, tuple(v.reshape(bands, together, width) for v in cut))
    return jax.tree.map(
        lambda x: x.reshape(-1, *x.shape[2:])[:units].reshape(*lead, *x.shape[2:]), sums
    )


__all__ = [
    "Matrix",
    "UnitCodec",
    "as_rounded",
    "flat",
    "fold",
    "largest_magnitude",
    "not_of_units",
    "reciprocal",
]
