"""Messages between the processes of a job, as bytes and back.

`encode` takes plain values, arrays, and this package's own records and errors by name. `decode`
builds nothing else: unlike a pickle, received bytes cannot name code to be run.
"""

from __future__ import annotations

import builtins
import dataclasses
import importlib
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, cast

import jax.numpy as jnp
import msgpack
import numpy as np
from etils import epath

PACKAGE = __name__.split(".")[0]
_PLAIN = (type(None), bool, float, str, bytes)
_COLLECTIONS = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}


def encode(value: Any) -> list[bytes]:
    """The structure of `value`, and the bytes of every array in it.

    Args:
      value: None, bool, int, float, str, bytes, path, NumPy array or scalar, exception; dataclasses
        and named tuples of this package; lists, tuples, sets and dicts of such. An exception that
        is neither a built-in one nor of this package becomes a RuntimeError that names it.

    Raises:
      TypeError: anything else.
    """
    buffers: list[bytes] = []
    structure = cast(bytes, msgpack.packb(_written(value, buffers)))
    return [structure, *buffers]


def decode(structure: bytes, receive: Callable[[int], bytearray]) -> Any:
    """Inverse of `encode`.

    Args:
      receive: number of bytes -> the next array's bytes.

    Raises:
      ValueError: bytes that `encode` does not make.
    """
    return _read(msgpack.unpackb(structure), receive)


def _written(value: Any, buffers: list[bytes]) -> Any:
    """Plain values as they are, all others as lists that begin with their kind."""
    kind = type(value)
    if kind in _PLAIN or (kind is int and -(2**63) <= value < 2**63):
        return value
    if kind is int:
        return ["int", str(value)]
    if kind.__name__ in _COLLECTIONS and kind is _COLLECTIONS[kind.__name__]:
        return [kind.__name__, *(_written(x, buffers) for x in value)]
    if kind is dict:
        return ["dict", *([_written(x, buffers) for x in pair] for pair in value.items())]
    if _is_array(value):
        buffers.append(value.tobytes())
        shape = None if isinstance(value, np.generic) else list(value.shape)
        return ["array", value.dtype.name, shape]
    if isinstance(value, PurePath):
        return ["path", str(value)]
    if isinstance(value, BaseException):
        return _error(value, buffers)
    if _is_record(kind):
        fields = {name: getattr(value, name) for name in _fields(kind)}
        return ["record", kind.__module__, kind.__qualname__, _written(fields, buffers)]
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} cannot be told to another process")


def _error(error: BaseException, buffers: list[bytes]) -> list:
    kind = type(error)
    if _is_error(kind):
        _, arguments, *state = error.__reduce__()
        try:
            given = [_written(x, buffers) for x in (arguments, state[0] if state else {})]
            msgpack.packb(given)
        except (TypeError, UnicodeError):
            pass  # arguments that cannot be encoded: its text can
        else:
            return ["error", kind.__module__, kind.__qualname__, *given]
    text = f"{kind.__name__}: {error}".encode(errors="backslashreplace").decode()
    return ["error", "builtins", "RuntimeError", ["tuple", text], ["dict"]]


def _is_array(value: Any) -> bool:
    """Of numbers that their dtype's name describes."""
    if not isinstance(value, np.generic) and type(value) is not np.ndarray:
        return False
    known = value.dtype.kind in "biufc" or value.dtype.isbuiltin == 2  # bfloat16, int4, ...
    return known and value.dtype.isnative


def _read(found: Any, receive: Callable[[int], bytearray]) -> Any:
    if not isinstance(found, list):
        return found
    kind, *rest = found or [None]
    if kind in _COLLECTIONS:
        return _COLLECTIONS[kind](_read(x, receive) for x in rest)
    match kind, rest:
        case "int", [str(digits)]:
            return int(digits)
        case "dict", pairs:
            return {_read(key, receive): _read(value, receive) for key, value in pairs}
        case "array", [str(name), shape]:
            return _array(jnp.dtype(name), shape, receive)
        case "path", [str(path)]:
            return epath.Path(path)
        case "record", [str(module), str(name), fields]:
            return _named(module, name, _is_record)(**_read(fields, receive))
        case "error", [str(module), str(name), arguments, state]:
            kind = _named(module, name, _is_error)
            return _raised(kind, _read(arguments, receive), _read(state, receive))
    raise ValueError(f"unknown kind of value: {kind!r}")


def _array(dtype: np.dtype, shape: list[int] | None, receive: Callable) -> np.ndarray | np.generic:
    count = int(np.prod(shape or ()))
    array = np.frombuffer(receive(count * dtype.itemsize), dtype)
    return array[0] if shape is None else array.reshape(shape)


def _raised(kind: type[BaseException], arguments: tuple, state: dict) -> BaseException:
    # Not by its own `__init__`, which may take other arguments than those that it hands on.
    error = kind(*arguments) if kind.__module__ == "builtins" else kind.__new__(kind, *arguments)
    error.__dict__.update(state)
    return error


def _named(module: str, name: str, fits: Callable[[type], bool]) -> type:
    """The class of this name, if `fits` holds for it."""
    if module == "builtins":
        found = getattr(builtins, name, None)
    elif module.split(".")[0] == PACKAGE and "." not in name:
        found = getattr(importlib.import_module(module), name, None)
    else:
        found = None
    if not (isinstance(found, type) and found.__module__ == module and fits(found)):
        raise ValueError(f"{module}.{name} is nothing that processes tell one another")
    return found


def _ours(kind: type) -> bool:
    return kind.__module__.split(".")[0] == PACKAGE


def _is_error(kind: type) -> bool:
    return issubclass(kind, BaseException if _ours(kind) else Exception) and (
        kind.__module__ == "builtins" or _ours(kind)
    )


def _is_record(kind: type) -> bool:
    named = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return _ours(kind) and (named or dataclasses.is_dataclass(kind))


def _fields(kind: type) -> tuple[str, ...]:
    if issubclass(kind, tuple):
        return kind._fields
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)
