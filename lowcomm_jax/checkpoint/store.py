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
import contextlib
import functools
import gc
import hashlib
import json
import logging
import math
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from etils import epath
from orbax.checkpoint import v1

from lowcomm_jax import compat
from lowcomm_jax.mesh.arrays import Box

Arrays = dict[str, np.ndarray]

log = logging.getLogger(__name__)
_QUIET = threading.Lock()

DOCUMENT = "document.json"
METRICS = "metrics.json"
ARRAYS = "arrays"
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


_Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Flight(msgspec.Struct):
    """What is read of a payload in flight; its record has more."""

    key: str
    fragment: int


class _Document(msgspec.Struct, kw_only=True):
    """What is read of a checkpoint's document; it has more.

    Attributes:
      arrays: (dtype, shape, boxes) by name; a box has process, number, start, dtype, shape, digest.
    """

    step: _Size
    regions: _Size
    in_flight: list[_Flight] = []
    metrics: dict[str, Any] = {}
    keys: dict[str, str] = {}
    arrays: dict[
        str,
        tuple[str, list[_Size], list[tuple[_Size, _Size, list[_Size], str, list[_Size], str]]],
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


def _save(part: epath.Path, arrays: Arrays) -> None:
    before = sys.unraisablehook
    sys.unraisablehook = functools.partial(_unless_loop_closed, before)
    with _context():
        v1.save_checkpointables(part, {ARRAYS: arrays})
    sys.unraisablehook = before  # after a failure its threads may still come


def _unless_loop_closed(hook: Callable[[Any], object], unraisable: Any) -> None:
    """Log for debugging that a thread of TensorStore came back to an event loop that has failed."""
    if str(unraisable.exc_value) == "Event loop is closed":
        log.debug("%s", unraisable.exc_value)
    else:
        hook(unraisable)


def _unless_of_orbax(record: logging.LogRecord) -> bool:
    """Keep for debugging what is logged of errors in Orbax's threads and tasks: it raises them."""
    text = record.getMessage()
    kept = "_SignalingThread.run() raised" in text
    kept |= text.startswith("Task exception was never retrieved") and "orbax" in text
    if kept:
        log.debug("%s", text, exc_info=record.exc_info)
    return not kept


for _name in ("absl", "asyncio"):
    logging.getLogger(_name).addFilter(_unless_of_orbax)


def _context() -> v1.Context:
    """Settings of Orbax: it waits for no other process, and copies no array once more.

    Directories are made first: else threads of Orbax wait 300 s for one that cannot be made.
    """
    context = v1.Context()
    context.multiprocessing.primary_host = compat.process_index()
    context.multiprocessing.active_processes = {compat.process_index()}
    context.asynchronous.create_directories_asynchronously = False
    context.memory.deepcopy_host_arrays = False
    context.pytree.loading.partial_load = True
    return context


def _load(part: epath.Path, keys: list[str]) -> Arrays:
    """These arrays of a part.

    Raises:
      DamagedError: naming the first that cannot be read; what Orbax says is logged for debugging.
    """
    if not part.exists():
        raise DamagedError(f"{part} is missing")
    with _quiet():
        found = _arrays_or_reason(part, keys)
        if isinstance(found, dict):
            return found
        what = f"{part}: its arrays cannot be read at once{found}"
        for key in keys:
            if isinstance(alone := _arrays_or_reason(part, [key]), str):
                what = f"{part}: {key.rpartition('@')[0]} cannot be read{alone}"
                break
        _retrieve_failed_tasks()
        gc.collect()
    raise DamagedError(what)


def _arrays_or_reason(part: epath.Path, keys: list[str]) -> Arrays | str:
    """Some arrays; where Orbax cannot load them, what the machine said, or nothing."""
    try:
        with _context():
            wanted = {ARRAYS: dict.fromkeys(keys, np.ndarray)}
            return v1.load_checkpointables(part, wanted)[ARRAYS]
    except Exception as error:
        # A damaged file can make the decoders below raise anything at all. Text only: the error
        # keeps coroutines alive.
        log.debug("%s: %s", part, "".join(traceback.format_exception(error)))
        machine = isinstance(error, OSError | MemoryError)
        return f" ({type(error).__name__})" if machine else ""


def _retrieve_failed_tasks() -> None:
    """Look at the errors of the failed tasks that Orbax left behind, one for every array.

    Asyncio prints an error that nobody looked at when its task is dropped, and Python warns of the
    coroutines in the error's frames. A thread of TensorStore may hold a task until after `_quiet`.
    """
    for task in gc.get_objects():
        if type(task) is asyncio.Task and task.get_loop().is_closed() and not task.cancelled():
            error = task.exception() if task.done() else None
            while error is not None:
                error.__traceback__ = None
                error = error.__context__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence what the failed tasks of a damaged file print: by asyncio, warnings, unraisables.

    These belong to the process: one thread at a time.
    """
    with _QUIET:
        logger = logging.getLogger("asyncio")
        level, hook = logger.level, sys.unraisablehook
        logger.setLevel(logging.CRITICAL + 1)
        sys.unraisablehook = lambda unraisable: log.debug("%s", unraisable.exc_value)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                yield
        finally:
            logger.setLevel(level)
            sys.unraisablehook = hook


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
