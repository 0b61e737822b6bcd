"""Arrays to bytes and back, and slices of payloads.

A payload is a file of the safetensors format with the format's own dtypes, and says in its metadata
which job has made it. Nothing is unpickled. `unpack` raises `Rejected`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import msgspec
import numpy as np
import safetensors
import safetensors.numpy

from lowcomm_jax.store.errors import Rejected

_METADATA = "lowcomm"

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
"""NumPy's names of the dtypes that travel, by those of safetensors."""

NAMES = {name: known for known, name in DTYPES.items()}
"""The other way round."""

Arrays = dict[str, np.ndarray]

Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""dtype name and shape of every array."""


class Job(NamedTuple):
    """One of the jobs that take a region's place one after another."""

    region: int
    incarnation: int


Jobs = Mapping[int, Sequence[int]]
"""Incarnations of the jobs that may have announced, by region, newest first."""


class About(msgspec.Struct, forbid_unknown_fields=True):
    """What a payload says of itself.

    Attributes:
      run: the run's id.
      region, incarnation: the job that has made it.
      serial: its number among the files of this job, so that no two are equal.
    """

    run: str
    region: int
    incarnation: int
    serial: int


def pack(run_id: str, job: Job, serial: int, arrays: Mapping[str, np.ndarray]) -> bytes:
    """A payload of this job; equal arguments give equal bytes.

    Raises:
      ValueError: an array has a dtype that safetensors has not.
    """
    shapes_of(arrays)
    about = msgspec.json.encode(About(run_id, *job, serial), order="sorted").decode()
    # One entry only: the format does not keep the order of several.
    flat = {name: np.require(x, requirements="C") for name, x in arrays.items()}
    return safetensors.numpy.save(flat, {_METADATA: about})


def unpack(data: bytes, run_id: str, job: Job, like: Shapes | None) -> Arrays:
    """The arrays of a payload.

    Args:
      like: shapes and dtypes that it must hold; None = any.

    Raises:
      Rejected: cut or malformed, of another run or job, or not `like`.
    """
    about, arrays = parse(data)
    found, expected = (about.run, about.region, about.incarnation), (run_id, *job)
    if found != expected:
        raise Rejected(f"a payload of (run, region, incarnation) {found} instead of {expected}")
    if like is not None and (shapes := shapes_of(arrays)) != like:
        raise Rejected(f"payload of region {job.region}: {_difference(shapes, like)}")
    return arrays


def digest(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def shapes_of(arrays: Mapping[str, Any]) -> Shapes:
    """dtype names and shapes of arrays or `ShapeDtypeStruct`s.

    Raises:
      ValueError: an array has a dtype that safetensors has not.
    """
    shapes = {name: (np.dtype(x.dtype).name, tuple(x.shape)) for name, x in arrays.items()}
    for name, (dtype, _) in shapes.items():
        if dtype not in NAMES:
            raise ValueError(
                f"{name} is {dtype}, which no payload can hold: use one of {sorted(NAMES)}; codes "
                "of less than a byte are packed into uint8"
            )
    return shapes


def without_region(like: Mapping[str, Any]) -> Shapes:
    """Shapes as they travel, of arrays `[1, ...]` with an axis of this region."""
    return {name: (dtype, shape[1:]) for name, (dtype, shape) in shapes_of(like).items()}


def restore(data: bytes, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """An array of its bytes in C order; `dtype` as safetensors calls it.

    Raises:
      ValueError: the bytes do not make an array of this dtype and shape.
    """
    if dtype not in DTYPES:
        raise ValueError(f"no dtype {dtype!r}")
    # Through jnp, which knows the narrow types that NumPy has no names for.
    return np.frombuffer(bytearray(data), jnp.dtype(DTYPES[dtype])).reshape(shape)


def owners(present: Sequence[int], parts: int) -> list[int]:
    """The region that reduces each slice: the one of its number, else one that is present."""
    return [s if s in present else present[s % len(present)] for s in range(parts)]


def one_slice(slices: Arrays, number: int) -> Arrays:
    """One slice, without the leading axis."""
    return {name: x[number] for name, x in slices.items()}


def side_by_side(by_region: Mapping[int, Arrays], count: int, like: Shapes) -> Arrays:
    """Rows `[R, ...]` of arrays `like` these; zeros for regions that are not in `by_region`."""
    # Through jnp, which knows the narrow types that NumPy has no names for.
    rows = {n: np.zeros((count, *shape), jnp.dtype(d)) for n, (d, shape) in like.items()}
    for region, arrays in by_region.items():
        for name, x in arrays.items():
            rows[name][region] = x
    return rows


def parse(data: bytes) -> tuple[About, Arrays]:
    """What a payload says of itself, and its arrays; raises `Rejected`."""
    try:
        size = int.from_bytes(data[:8], "little")
        header = msgspec.json.decode(data[8 : 8 + size], type=dict[str, Any])
        about = msgspec.json.decode(header["__metadata__"][_METADATA], type=About)
        found = safetensors.deserialize(data)
        return about, {name: restore(x["data"], x["dtype"], x["shape"]) for name, x in found}
    except (
        *(safetensors.SafetensorError, msgspec.MsgspecError),
        *(ValueError, KeyError, TypeError, RecursionError),
    ) as error:
        raise Rejected(f"not a payload: {error}") from None


def _difference(found: Shapes, like: Shapes) -> str:
    """The first arrays in which two descriptions differ, in words."""
    names = [name for name in sorted(found.keys() | like) if found.get(name) != like.get(name)]
    parts = [f"{name} is {found.get(name)}, expected {like.get(name)}" for name in names[:3]]
    return "; ".join(parts) + ("" if len(names) <= 3 else f"; and {len(names) - 3} more")
