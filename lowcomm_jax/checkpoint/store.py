"""One checkpoint on disk: written atomically, every array verified by its digest when read.

Layout of `<step>/`: `shared/` and `region_<i>/` hold arrays, `document/` JSON (config, positions,
payloads in flight, the digest of every array); all are Orbax checkpointables.

Where several processes write together (`write_part`, `seal_parts`), `<step>/part_<i>/` holds the
array parts on the devices of process i, and `<step>/sealed/` the document. Both are Orbax
checkpoints. Any number of processes can read either layout.

`<step>/metrics.json` holds metrics that were measured after the checkpoint was written.
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
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from etils import epath
from orbax.checkpoint import v1

from lowcomm_jax.mesh.arrays import Box
from lowcomm_jax.state import leaves

Arrays = dict[str, np.ndarray]
Groups = dict[str, Arrays]

log = logging.getLogger(__name__)
_QUIET = threading.Lock()

_GROUPS = "groups"  # the layout of what one process has written
_PARTS = "parts"  # and of what several have written together
DOCUMENT = "document"
COMMITTED = "commit_success.txt"
REPLACED = ".replaced"
DELETED = ".deleted"
SEALED = "sealed"
METRICS = "metrics.json"
BOXES = "boxes"
TEMPORARY = ".orbax-checkpoint-tmp"
_STEP = re.compile(r"(\d+)(\.replaced)?")
_LEFTOVER = re.compile(
    rf"(\d+)({re.escape(TEMPORARY)}.*|{re.escape(REPLACED)}|{re.escape(DELETED)})"
)


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


def _digest_of(document: dict) -> str:
    return digest(json.dumps(document, sort_keys=True).encode())


# -- one step ---------------------------------------------------------------------------------


def write(path: epath.Path, groups: Groups, document: dict) -> None:
    """Write `<step>/` under a temporary name and rename it when it is complete.

    An older checkpoint of the same step stays readable until the new one is.
    """
    index = {group: _index(found) for group, found in groups.items()}
    document = {"layout": _GROUPS, **document, "arrays": index}
    older = _put_aside(path)
    # Orbax writes no empty arrays; their shape in the document is all there is to them.
    filled = {g: {k: x for k, x in found.items() if x.size} for g, found in groups.items()}
    _save(path, document, filled)
    remove(older)


def _put_aside(path: epath.Path) -> epath.Path:
    """Rename the older checkpoint of a step, if there is one; returns its new name."""
    older = path.with_name(path.name + REPLACED)
    if path.exists():
        remove(older)
        path.rename(older)
    return older


def _save(path: epath.Path, document: dict, groups: Groups) -> None:
    """Write one Orbax checkpoint.

    Raises:
      OSError, ValueError: it cannot be written; raised within seconds, and nothing else is printed.
    """
    sealed = {"content": document, "digest": _digest_of(document)}
    before = sys.unraisablehook
    sys.unraisablehook = functools.partial(_unless_loop_closed, before)
    with _context():
        v1.save_checkpointables(path, {DOCUMENT: sealed, **groups})
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
    """Orbax settings under which the document is JSON, not a pytree.

    Directories are made first: else threads of Orbax wait 300 s for one that cannot be made.
    """
    context = v1.Context()
    context.asynchronous.create_directories_asynchronously = False
    context.checkpointables.registry = v1.handlers.local_registry()
    context.checkpointables.registry.add(v1.handlers.JsonHandler, checkpointable_name=DOCUMENT)
    return context


def _index(arrays: Arrays) -> dict[str, list]:
    return {name: _entry(x) for name, x in arrays.items()}


def _entry(x: np.ndarray) -> list:
    return [x.dtype.name, list(x.shape), digest(x)]


def read_document(path: epath.Path) -> dict:
    """Read and verify the document of a checkpoint; its metrics include those added later.

    Raises:
      DamagedError: there is none, its digest differs, or it is that of another step.
    """
    document = _read_document(path / SEALED if (path / SEALED).exists() else path)
    checked(document, str(path))
    name = _STEP.fullmatch(path.name)
    if name and document["step"] != int(name[1]):
        raise DamagedError(
            f"{path}: it was written at step {document['step']}, and renamed or copied here"
        )
    document["metrics"] = {**document.get("metrics", {}), **_added_metrics(path)}
    return document


def add_metrics(path: epath.Path, metrics: dict[str, float]) -> None:
    """Write metrics beside a complete checkpoint, atomically; of the same name the new one counts.

    Raises:
      OSError: the file cannot be written; the checkpoint is as it was.
    """
    beside = path / f"{METRICS}.new"
    beside.write_text(json.dumps({**_added_metrics(path), **metrics}))
    beside.replace(path / METRICS)


def _added_metrics(path: epath.Path) -> dict[str, float]:
    """Metrics added later. A damaged file is none: the checkpoint is whole without it."""
    file = path / METRICS
    if not file.exists():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        log.warning("%s is damaged, and its metrics do not count: %s", file, error)
        return {}


def _read_document(path: epath.Path) -> dict:
    if not (path / COMMITTED).exists():
        raise DamagedError(f"{path}: the save was never committed ({COMMITTED} is missing)")
    sealed = _decode(path, [DOCUMENT])[DOCUMENT]
    if not isinstance(sealed, dict) or sealed.keys() != {"content", "digest"}:
        raise DamagedError(f"{path}: the document is not one of a checkpoint")
    if sealed["digest"] != _digest_of(sealed["content"]):
        raise DamagedError(f"{path}: the document differs from its digest")
    return sealed["content"]


def checked(document: Any, where: str) -> dict:
    """A checkpoint's document whose fields are what readers take them for.

    Its digest tells of damage, not of who wrote it.

    Raises:
      DamagedError: it lacks a field, or one is of another kind.
    """
    try:
        found = msgspec.convert(document, _InGroups | _InParts)
        if isinstance(found, _InGroups):
            if not {leaves.SHARED, leaves.region_group(0)} <= found.arrays.keys():
                raise ValueError("no group of all regions, or none of the first")
            dtypes = [dtype for group in found.arrays.values() for dtype, *_ in group.values()]
        else:
            dtypes = [dtype for dtype, *_ in found.arrays.values()]
            dtypes += [box[3] for *_, boxes in found.arrays.values() for box in boxes]
        for dtype in dtypes:
            jnp.dtype(dtype)
    except (ValueError, TypeError) as error:
        raise DamagedError(f"{where}: the document is not one of a checkpoint ({error})") from None
    return document


_Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Flight(msgspec.Struct):
    """What is read of a payload in flight; its record has more."""

    key: str
    fragment: int


class _Document(msgspec.Struct, tag_field="layout"):
    """What is read of a checkpoint's document; it has more."""

    step: _Size
    regions: _Size
    in_flight: list[_Flight] = []
    metrics: dict[str, Any] = {}
    keys: dict[str, str] = {}


class _InGroups(_Document, tag=_GROUPS, kw_only=True):
    """Arrays (dtype, shape, digest) by group, which are those of all regions and of each."""

    arrays: dict[str, dict[str, tuple[str, list[_Size], str]]]


class _InParts(_Document, tag=_PARTS, kw_only=True):
    """Arrays (dtype, shape, boxes) by name; a box has process, number, start, and an entry."""

    arrays: dict[
        str,
        tuple[str, list[_Size], list[tuple[_Size, _Size, list[_Size], str, list[_Size], str]]],
    ]


def saved_shapes(document: dict) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the arrays that `read_arrays` returns."""
    if document["layout"] == _GROUPS:
        return leaves.saved_shapes(document["arrays"])
    return {
        name: jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype))
        for name, (dtype, shape, _) in document["arrays"].items()
    }


def read_arrays(path: epath.Path, document: dict) -> Arrays:
    """Read every array of the whole state and compare it with its digest.

    Raises:
      DamagedError: naming the first array that is missing or altered.
    """
    if document["layout"] == _GROUPS:
        return _read_groups(path, document)
    return _read_parts(path, document)


def _read_groups(path: epath.Path, document: dict) -> Arrays:
    index = document["arrays"]
    found = _decode(path, index)
    groups: Groups = {}
    for group, entries in index.items():
        groups[group] = {}
        for name, (dtype, shape, expected) in entries.items():
            where = f"{path}: {group}: {name}"
            groups[group][name] = _verified(found[group].get(name), dtype, shape, expected, where)
    return leaves.gather(groups)


def _verified(
    array: np.ndarray | None, dtype: str, shape: list[int], expected: str, where: str
) -> np.ndarray:
    if 0 in shape:
        array = np.zeros(shape, dtype)
    if array is None:
        raise DamagedError(f"{where} is missing")
    if array.dtype.name != dtype or list(array.shape) != shape or digest(array) != expected:
        raise DamagedError(f"{where} differs from its digest")
    return array


def _decode(path: epath.Path, names: Iterable[str]) -> dict[str, Any]:
    """Load some checkpointables as they were saved.

    Raises:
      DamagedError: naming the first that cannot be loaded; what Orbax says is logged for debugging.
    """
    names = list(names)
    with _quiet():
        found = _load(path, names)
        if isinstance(found, dict):
            return found
        alone = {name: _load(path, [name]) for name in names}
        _retrieve_failed_tasks()
        gc.collect()
    for name, of in alone.items():
        if isinstance(of, str):
            how = f"cannot be read{of}" if (path / name).exists() else "is missing"
            raise DamagedError(f"{path}: {name} {how}")
    raise DamagedError(f"{path}: {', '.join(names)} could not be read at once{found}")


def _load(path: epath.Path, names: list[str]) -> dict[str, Any] | str:
    """Some checkpointables; where Orbax cannot load them, what the machine said, or nothing."""
    try:
        with _context():
            return v1.load_checkpointables(path, dict.fromkeys(names))
    except Exception as error:
        # A damaged file can make the decoders below raise anything at all. Text only: the error
        # keeps coroutines alive.
        log.debug("%s: %s", path, "".join(traceback.format_exception(error)))
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


# -- one step, written by several processes ----------------------------------------------------


def parts_of(path: epath.Path) -> epath.Path:
    """Where processes write their parts of a step, before it is sealed."""
    return path.with_name(f"{path.name}{TEMPORARY}-parts")


def begin_parts(path: epath.Path) -> None:
    """Make an empty folder for a step's parts; deletes files of an interrupted save."""
    parts = parts_of(path)
    if parts.exists():
        parts.rmtree()
    parts.mkdir(parents=True)


def write_part(path: epath.Path, process: int, boxes: dict[str, list[Box]]) -> None:
    """Write one process's part of a step; parts are collected in `parts_of(path)`."""
    index, filled = {}, {}
    for name, found in boxes.items():
        index[name] = [[list(box.first), *_entry(box.values)] for box in found]
        filled |= {_key(name, i): box.values for i, box in enumerate(found) if box.values.size}
    _save(_part(parts_of(path), process), {"boxes": index}, {BOXES: filled} if filled else {})


def has_part(path: epath.Path, process: int) -> bool:
    """Whether a process has written its part of a step that is not sealed yet."""
    return (_part(parts_of(path), process) / COMMITTED).exists()


def seal_parts(path: epath.Path, processes: int, arrays: dict[str, list], document: dict) -> None:
    """Make the parts of all processes the checkpoint `<step>/`.

    Args:
      arrays: name -> [dtype, shape] of every array, whole.

    Raises:
      DamagedError: a part is missing or damaged, or together they do not fill an array.
    """
    parts = parts_of(path)
    index = {name: [dtype, list(shape), []] for name, (dtype, shape) in arrays.items()}
    for process in range(processes):
        for name, boxes in _read_document(_part(parts, process))["boxes"].items():
            index[name][2] += [[process, i, *box] for i, box in enumerate(boxes)]
    for name, (_, shape, boxes) in index.items():
        held = sum(math.prod(box_shape) for *_, box_shape, _ in boxes)
        if held != math.prod(shape):
            raise DamagedError(f"{parts}: {name}: {held} of {math.prod(shape)} elements written")
    _save(parts / SEALED, {"layout": _PARTS, **document, "arrays": index}, {})
    older = _put_aside(path)
    parts.rename(path)
    remove(older)


def _part(folder: epath.Path, process: int) -> epath.Path:
    return folder / f"part_{process}"


def _key(name: str, box: int) -> str:
    return f"{name}@{box}"


def _read_parts(path: epath.Path, document: dict) -> Arrays:
    index = document["arrays"]
    parts = {box[0] for _, _, boxes in index.values() for box in boxes}
    found = {process: _read_boxes(_part(path, process)) for process in sorted(parts)}
    whole = {}
    for name, (dtype, shape, boxes) in index.items():
        whole[name] = np.empty(shape, dtype)
        for process, i, first, box_dtype, box_shape, expected in boxes:
            where = f"{_part(path, process)}: {name} at {first}"
            array = found[process].get(_key(name, i))
            span = tuple(slice(a, a + n) for a, n in zip(first, box_shape))
            whole[name][span] = _verified(array, box_dtype, box_shape, expected, where)
    return whole


def _read_boxes(part: epath.Path) -> Arrays:
    boxes = _read_document(part)["boxes"]
    filled = any(0 not in shape for found in boxes.values() for _, _, shape, _ in found)
    return _decode(part, [BOXES])[BOXES] if filled else {}


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
