"""Arrays to bytes and back, and the contract of payloads that are reduced in slices.

`pack` and `unpack` use safetensors, with the run, the key and the region in the metadata. Every
array travels as its raw bytes (uint8) beside its dtype and shape, so that narrow float and integer
types need no support from the format. Nothing is unpickled. `unpack` raises `Rejected`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from lowcomm_jax.runtime.errors import Rejected

_METADATA = "payload"

Arrays = dict[str, np.ndarray]

Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""dtype name and shape of every array."""


def pack(run_id: str, key: str, region: int, arrays: Mapping[str, np.ndarray]) -> bytes:
    """One region's payload; equal arguments give equal bytes."""
    shapes = shapes_of(arrays)
    about = {"run": run_id, "key": key, "region": region, "arrays": shapes}
    flat = {name: raw(x) for name, x in arrays.items()}
    # One entry only: the format does not keep the order of several.
    return safetensors.numpy.save(flat, {_METADATA: json.dumps(about, sort_keys=True)})


def unpack(
    data: bytes, *, run_id: str, key: str, region: int, like: Shapes | None
) -> dict[str, np.ndarray]:
    """The arrays of a payload.

    Args:
      like: shapes and dtypes that it must hold; None = those in its own header.

    Raises:
      Rejected: cut or malformed, of another run, key or region, or not `like`.
    """
    about, flat = _parse(data)
    expected = {"run": run_id, "key": key, "region": region}
    for name, value in expected.items():
        if about.get(name) != value:
            raise Rejected(f"payload of {name} {about.get(name)!r} instead of {value!r}")
    try:
        shapes = {name: (dtype, tuple(shape)) for name, (dtype, shape) in about["arrays"].items()}
        if like is not None and shapes != like:
            raise Rejected(f"payload of region {region} for {key!r}: {_difference(shapes, like)}")
        return {name: restore(flat[name], *shapes[name]) for name in shapes}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Rejected(f"payload of region {region} for {key!r}: {error}") from None


def digest(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def shapes_of(arrays: Mapping[str, Any]) -> Shapes:
    """dtype names and shapes of arrays or `ShapeDtypeStruct`s."""
    return {name: (np.dtype(x.dtype).name, tuple(x.shape)) for name, x in arrays.items()}


def raw(array: np.ndarray) -> np.ndarray:
    """The bytes of an array in C order, uint8 `[nbytes]`."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def dtype_name(array: np.ndarray) -> str:
    """The dtype of an array, as records name it."""
    return np.dtype(array.dtype).name


def restore(data: bytes, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Inverse of `raw`.

    Raises:
      ValueError: the bytes do not make an array of this dtype and shape.
    """
    # Through jnp, which knows the narrow types that NumPy has no names for.
    return np.frombuffer(data, jnp.dtype(dtype)).reshape(shape).copy()


class Reduction(Protocol):
    """How payloads are cut into slices and averaged; called on the threads of an exchange.

    Attributes:
      parts: how many slices, one for each region of the run.
      like: dtypes and shapes of one slice, cut or reduced.
      rest: dtypes and shapes of the arrays that every region needs beside the slices.
    """

    parts: int
    like: Shapes
    rest: Shapes

    def split(self, arrays: Arrays) -> tuple[Arrays, Arrays]:
        """One region's arrays as (arrays for every region, slices `[parts, ...]`)."""
        ...

    def reduce(self, slice_R: Arrays, rest_R: Arrays, takes_part_R: np.ndarray) -> Arrays:
        """Average or sum, `like`, of every region's slice of one number.

        Args:
          slice_R: `[R, ...]`; rest_R: the first result of `split`, `[R, ...]`; zeros for regions
            that take no part.
          takes_part_R: bool `[R]`.
        """
        ...


def owners(present: Sequence[int], parts: int) -> list[int]:
    """The region that reduces each slice: the one of its number, else one that is present."""
    return [s if s in present else present[s % len(present)] for s in range(parts)]


def one_slice(slices: Arrays, number: int) -> Arrays:
    """One slice, without the leading axis."""
    return {name: x[number] for name, x in slices.items()}


def name_of_slice(name: str, number: int) -> str:
    """The name under which a slice of a payload is packed."""
    return f"{name}/slice {number}"


def side_by_side(by_region: Mapping[int, Arrays], count: int, like: Shapes) -> Arrays:
    """Rows `[R, ...]` of arrays `like` these; zeros for regions that are not in `by_region`."""
    # Through jnp, which knows the narrow types that NumPy has no names for.
    rows = {n: np.zeros((count, *shape), jnp.dtype(d)) for n, (d, shape) in like.items()}
    for region, arrays in by_region.items():
        for name, x in arrays.items():
            rows[name][region] = x
    return rows


def _parse(data: bytes) -> tuple[dict, dict[str, bytes]]:
    try:
        flat = {name: info["data"] for name, info in safetensors.deserialize(data)}
        size = int.from_bytes(data[:8], "little")
        about = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][_METADATA])
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise Rejected(f"not a payload: {error}") from None
    if not isinstance(about, dict):
        raise Rejected("not a payload: no description of its arrays")
    return about, flat


def _difference(found: Shapes, like: Shapes) -> str:
    """The first arrays in which two descriptions differ, in words."""
    names = [name for name in sorted(found.keys() | like) if found.get(name) != like.get(name)]
    parts = [f"{name} is {found.get(name)}, expected {like.get(name)}" for name in names[:3]]
    return "; ".join(parts) + ("" if len(names) <= 3 else f"; and {len(names) - 3} more")
