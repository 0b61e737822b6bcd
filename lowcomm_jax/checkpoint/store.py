"""One checkpoint on disk: written atomically, every array verified by its digest when read.

`<step>/` holds

- `part_<i>/`: the boxes (parts of arrays) that process i has written, an Orbax checkpoint. A job of
  one process writes whole arrays;
- `document.json`: config, positions, payloads in flight; for every box its place in the array, its
  type, shape and digest; and a digest of all that;
- `metrics.json`: metrics that were measured after the checkpoint was written.

`begin`, `write_part` and `seal` make a checkpoint; it has another name until it is sealed. Any
number of processes can read it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import re
from collections.abc import Awaitable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import type_handlers

from lowcomm_jax import compat
from lowcomm_jax.mesh.arrays import Box
from lowcomm_jax.store.records import Size

Arrays = dict[str, np.ndarray]
T = TypeVar("T")

log = logging.getLogger(__name__)

DOCUMENT = "document.json"
METRICS = "metrics.json"
UNFINISHED = ".unfinished"
REPLACED = ".replaced"
DELETED = ".deleted"
_STEP = re.compile(r"(\d+)(\.replaced)?")
_LEFTOVER = re.compile(r"(\d+)(\.unfinished|\.replaced)?(\.deleted)?")


class DamagedError(Exception):
    """A checkpoint cannot be read back as it was written; the message names it and says why."""


def digest(data: bytes | np.ndarray) -> str:
    """BLAKE2b-128 of bytes, or of an array's elements in C order."""
    if isinstance(data, np.ndarray):
        # Through uint8, since narrow float types have no buffer protocol of their own.
        data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def plain(value: Any) -> Any:
    """`value` as it is after it was written as JSON and read again.

    Raises:
      TypeError: a part of it cannot be written as JSON.
    """
    return json.loads(json.dumps(value))


# -- writing one step --------------------------------------------------------------------------


def begin(path: epath.Path) -> None:
    """Make an empty folder for a step's parts; deletes files of an interrupted save.

    Raises:
      OSError: it cannot be made.
    """
    folder = unfinished(path)
    if folder.exists():
        folder.rmtree()
    folder.mkdir(parents=True)


def unfinished(path: epath.Path) -> epath.Path:
    """Where a step lies before it is sealed."""
    return path.with_name(path.name + UNFINISHED)


def write_part(path: epath.Path, process: int, boxes: dict[str, list[Box]]) -> None:
    """Write one process's part of a step that has begun.

    Raises:
      OSError, ValueError: it cannot be written; raised within seconds, and nothing else is printed.
    """
    index, filled = {}, {}
    for name, found in boxes.items():
        index[name] = [[list(first), x.dtype.name, list(x.shape), digest(x)] for first, x in found]
        # Orbax writes no empty arrays; their shape in the index is all there is to them.
        filled |= {_key(name, i): x for i, (_, x) in enumerate(found) if x.size}
    part = _part(unfinished(path), process)
    if filled:
        _save(part, filled)
    _write_sealed(_index_of(part), index)


def has_part(path: epath.Path, process: int) -> bool:
    """Whether a process has written its part of a step that is not sealed yet."""
    return _index_of(_part(unfinished(path), process)).exists()


def seal(path: epath.Path, processes: int, arrays: dict[str, list], document: dict) -> None:
    """Make the parts of all processes the checkpoint `<step>/`.

    An older checkpoint of the same step stays readable until the new one is.

    Args:
      arrays: name -> [dtype, shape] of every array, whole.

    Raises:
      DamagedError: a part is missing or damaged, or together they do not fill an array.
    """
    folder = unfinished(path)
    index = {name: [dtype, list(shape), []] for name, (dtype, shape) in arrays.items()}
    files = [_index_of(_part(folder, process)) for process in range(processes)]
    for process, file in enumerate(files):
        for name, boxes in _read_sealed(file).items():
            index[name][2] += [[process, i, *box] for i, box in enumerate(boxes)]
    for name, (_, shape, boxes) in index.items():
        held = sum(math.prod(box_shape) for *_, box_shape, _ in boxes)
        if held != math.prod(shape):
            raise DamagedError(f"{folder}: {name}: {held} of {math.prod(shape)} elements written")
    _write_sealed(folder / DOCUMENT, {**document, "arrays": index})
    for file in files:  # all they say is in the document
        file.unlink()
    older = path.with_name(path.name + REPLACED)
    if path.exists():
        remove(older)
        path.rename(older)
    folder.rename(path)
    remove(older)


def add_metrics(path: epath.Path, metrics: dict[str, float]) -> None:
    """Write metrics beside a complete checkpoint, atomically; of the same name the new one counts.

    Raises:
      OSError: the file cannot be written; the checkpoint is as it was.
    """
    _write_json(path / METRICS, {**_added_metrics(path), **metrics})


def _part(folder: epath.Path, process: int) -> epath.Path:
    return folder / f"part_{process}"


def _index_of(part: epath.Path) -> epath.Path:
    """The file that says what a part holds; written when the part is complete."""
    return part.with_name(f"{part.name}.json")


def _key(name: str, box: int) -> str:
    return f"{name}@{box}"


def _write_sealed(file: epath.Path, content: dict) -> None:
    _write_json(file, {"content": content, "digest": _digest_of(content)})


def _write_json(file: epath.Path, value: Any) -> None:
    beside = file.with_name(f"{file.name}.new")
    beside.write_text(json.dumps(value))
    beside.replace(file)


def _digest_of(content: dict) -> str:
    return digest(json.dumps(content, sort_keys=True).encode())


# -- reading one step --------------------------------------------------------------------------


def read_document(path: epath.Path) -> dict:
    """Read and verify the document of a checkpoint; its metrics include those added later.

    Raises:
      DamagedError: there is none, its digest differs, or it is that of another step.
    """
    document = checked(_read_sealed(path / DOCUMENT), str(path))
    name = _STEP.fullmatch(path.name)
    if name and document["step"] != int(name[1]):
        raise DamagedError(
            f"{path}: it was written at step {document['step']}, and renamed or copied here"
        )
    document["metrics"] = {**document.get("metrics", {}), **_added_metrics(path)}
    return document


def _added_metrics(path: epath.Path) -> dict[str, float]:
    """Metrics added later. A damaged file is none: the checkpoint is whole without it."""
    file = path / METRICS
    if not file.exists():
        return {}
    try:
        return msgspec.convert(json.loads(file.read_bytes()), type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        log.warning("%s is damaged, and its metrics do not count: %s", file, error)
        return {}


def _read_sealed(file: epath.Path) -> dict:
    """The content of a file of `_write_sealed`.

    Raises:
      DamagedError: it is missing, cannot be read, or differs from its digest.
    """
    try:
        sealed = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise DamagedError(f"{file} is missing") from None
    except OSError as error:
        raise DamagedError(f"{file} cannot be read ({type(error).__name__})") from None
    except (ValueError, RecursionError):
        raise DamagedError(f"{file} cannot be read") from None
    if not isinstance(sealed, dict) or sealed.keys() != {"content", "digest"}:
        raise DamagedError(f"{file} is not of a checkpoint")
    if sealed["digest"] != _digest_of(sealed["content"]):
        raise DamagedError(f"{file} differs from its digest")
    return sealed["content"]


def checked(document: Any, where: str) -> dict:
    """A checkpoint's document whose fields are what readers take them for.

    Its digest tells of damage, not of who wrote it.

    Raises:
      DamagedError: it lacks a field, or one is of another kind.
    """
    try:
        for dtype, _, boxes in msgspec.convert(document, _Document).arrays.values():
            for one in (dtype, *(box[3] for box in boxes)):
                jnp.dtype(one)
    except (ValueError, TypeError) as error:
        raise DamagedError(f"{where}: the document is not one of a checkpoint ({error})") from None
    return document


class _Flight(msgspec.Struct):
    """What is read of a payload in flight; its record has more."""

    key: str
    fragment: int


class _Document(msgspec.Struct, kw_only=True):
    """What is read of a checkpoint's document; it has more.

    Attributes:
      in_flight: by training state, the prefix of its arrays' names.
      arrays: (dtype, shape, boxes) by name; a box has process, number, start, dtype, shape, digest.
    """

    step: Size
    regions: Size
    in_flight: dict[str, list[_Flight]] = {}
    metrics: dict[str, Any] = {}
    keys: dict[str, str] = {}
    arrays: dict[
        str,
        tuple[str, list[Size], list[tuple[Size, Size, list[Size], str, list[Size], str]]],
    ]


def saved_shapes(document: dict) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the arrays that `read_arrays` returns."""
    return {
        name: jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype))
        for name, (dtype, shape, _) in document["arrays"].items()
    }


def read_arrays(path: epath.Path, document: dict) -> Arrays:
    """Read every array of the whole state and compare it with its digests.

    Raises:
      DamagedError: naming an array that is missing, altered or cannot be read.
    """
    index = document["arrays"]
    filled: dict[int, list[str]] = {}
    for name, (_, _, boxes) in index.items():
        for process, i, _, _, shape, _ in boxes:
            if 0 not in shape:
                filled.setdefault(process, []).append(_key(name, i))
    found = {process: _load(_part(path, process), keys) for process, keys in filled.items()}
    whole = {}
    for name, (dtype, shape, boxes) in index.items():
        whole[name] = np.empty(shape, dtype)
        for process, i, first, box_dtype, box_shape, expected in boxes:
            if 0 in box_shape:
                continue
            array = found[process][_key(name, i)]
            same = array.dtype.name == box_dtype and list(array.shape) == box_shape
            if not same or digest(array) != expected:
                part = _part(path, process)
                raise DamagedError(f"{part}: {name} at {first} differs from its digest")
            whole[name][tuple(slice(a, a + n) for a, n in zip(first, box_shape))] = array
    return whole


# -- Orbax -------------------------------------------------------------------------------------


class _HostArrays(type_handlers.NumpyHandler):
    """Arrays of the host: any process writes its own, and one that cannot be read is named.

    Orbax's handler (0.12.8) writes them in process 0 alone. Of several that fail it leaves tasks
    behind, which print when they are dropped.
    """

    async def serialize(self, values, infos, args=None):
        specs = [compat.array_write_spec(x, info) for x, info in zip(values, infos)]
        writes = zip(values, specs, infos)
        await _all([self._open_and_write(x, s, info.ts_context) for x, s, info in writes])
        return []  # futures of what is still to be written

    async def deserialize(self, infos, args=None):
        return await _all([self._read(info) for info in infos])

    async def _read(self, info) -> np.ndarray:
        try:
            (array,) = await super().deserialize([info])
        except Exception as error:  # a damaged file can make the decoders below raise anything
            name = info.name.rpartition("@")[0]
            raise _unreadable(f"{info.parent_dir}: {name} cannot be read", error) from None
        return array


async def _all(reads_or_writes: list[Awaitable[T]]) -> list[T]:
    """The results of all, once all have ended; raises the first error in their order."""
    results: list[T] = []
    for result in await asyncio.gather(*reads_or_writes, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return results


def _unless_raised(record: logging.LogRecord) -> bool:
    """Keep for debugging what Orbax logs of errors in its threads: it raises them, too."""
    raised = "_SignalingThread.run() raised" in record.getMessage()
    if raised:
        log.debug("%s", record.getMessage(), exc_info=record.exc_info)
    return not raised


logging.getLogger("absl").addFilter(_unless_raised)


def _handler() -> ocp.PyTreeCheckpointHandler:
    """What writes and reads a part; it waits for no other process.

    Without `active_processes`, Orbax (0.12.8) meets all processes by collectives of the devices.
    """
    process = compat.process_index()
    return ocp.PyTreeCheckpointHandler(
        use_zarr3=True,
        enable_pinned_host_transfer=False,  # arrays are on the host; else it asks for devices
        multiprocessing_options=ocp.options.MultiprocessingOptions(
            primary_host=process, active_processes={process}
        ),
        type_handler_registry=type_handlers.create_type_handler_registry(
            (np.ndarray, _HostArrays(deepcopy_host_arrays=False)),
            (jax.Array, type_handlers.ArrayHandler()),  # there are none; without it Orbax warns
        ),
    )


def _save(part: epath.Path, arrays: Arrays) -> None:
    part.mkdir()
    handler = _handler()
    handler.save(part, args=ocp.args.PyTreeSave(arrays))
    handler.finalize(part)


def _load(part: epath.Path, keys: list[str]) -> Arrays:
    """These arrays of a part.

    Raises:
      DamagedError: naming the first that cannot be read; what Orbax says is logged for debugging.
    """
    if not part.exists():
        raise DamagedError(f"{part} is missing")
    wanted = ocp.args.PyTreeRestore(
        item=dict.fromkeys(keys, 0),
        restore_args=dict.fromkeys(keys, ocp.RestoreArgs(restore_type=np.ndarray)),
        partial_restore=True,
    )
    try:
        return _handler().restore(part, args=wanted)
    except DamagedError:
        raise
    except Exception as error:  # as in `_HostArrays`
        raise _unreadable(f"{part}: its arrays cannot be read", error) from None


def _unreadable(what: str, error: Exception) -> DamagedError:
    """With the kind of an error of the machine; else nobody should look for anything but damage."""
    log.debug("%s", what, exc_info=error)
    machine = isinstance(error, OSError | MemoryError)
    return DamagedError(what + f" ({type(error).__name__})" * machine)


# -- a directory of steps ---------------------------------------------------------------------


def steps(directory: epath.Path) -> dict[int, epath.Path]:
    """Checkpoints in a directory by step, ascending; by their names they are complete."""
    found: dict[int, epath.Path] = {}
    for path in sorted(directory.iterdir(), key=lambda p: p.name) if directory.exists() else ():
        match = _STEP.fullmatch(path.name)
        # `7` sorts before `7.replaced`, which only counts when the replacement was never finished.
        if match:
            found.setdefault(int(match[1]), path)
    return dict(sorted(found.items()))


def leftovers(directory: epath.Path) -> list[tuple[int, epath.Path]]:
    """Files left by interrupted saves and deletions: (step, path)."""
    used = set(steps(directory).values())
    found = []
    for path in sorted(directory.iterdir(), key=lambda p: p.name) if directory.exists() else ():
        match = _LEFTOVER.fullmatch(path.name)
        if match and path not in used:
            found.append((int(match[1]), path))
    return found


def remove(path: epath.Path) -> None:
    """Delete a checkpoint, if it is there, so that an interrupted deletion leaves no half of it."""
    if not path.exists():
        return
    doomed = path if path.name.endswith(DELETED) else path.with_name(path.name + DELETED)
    if doomed != path:
        if doomed.exists():
            doomed.rmtree()
        path.rename(doomed)
    doomed.rmtree()
