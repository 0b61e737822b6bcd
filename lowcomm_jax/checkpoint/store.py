"""One checkpoint on disk: written atomically, every array verified by its digest when read.

Layout of `<step>/`: `shared/` and `region_<i>/` hold arrays, `document/` JSON (config, positions,
what is in flight, the digest of every array); all are Orbax checkpointables.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from etils import epath
from orbax.checkpoint import v1

Groups = dict[str, dict[str, np.ndarray]]

DOCUMENT = "document"
COMMITTED = "commit_success.txt"
REPLACED = ".replaced"
DELETED = ".deleted"
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
    """What `value` becomes when it is written as JSON and read again.

    Raises:
      TypeError: something in it cannot be written as JSON.
    """
    return json.loads(json.dumps(value))


def _seal(document: dict) -> str:
    return digest(json.dumps(document, sort_keys=True).encode())


# -- one step ---------------------------------------------------------------------------------


def write(path: epath.Path, groups: Groups, document: dict) -> None:
    """Write `<step>/` under a temporary name and rename it when it is complete.

    An older checkpoint of the same step stays readable until the new one is.
    """
    document = {**document, "arrays": {g: _index(arrays) for g, arrays in groups.items()}}
    older = path.with_name(path.name + REPLACED)
    if path.exists():
        remove(older)
        path.rename(older)
    # Orbax writes no empty arrays; their shape in the document is all there is to them.
    filled = {g: {k: x for k, x in arrays.items() if x.size} for g, arrays in groups.items()}
    sealed = {"content": document, "digest": _seal(document)}
    with _context():
        v1.save_checkpointables(path, {DOCUMENT: sealed, **filled})
    remove(older)


def _context() -> v1.Context:
    """Orbax settings under which the document is JSON, not a pytree."""
    context = v1.Context()
    context.checkpointables.registry = v1.handlers.local_registry()
    context.checkpointables.registry.add(v1.handlers.JsonHandler, checkpointable_name=DOCUMENT)
    return context


def _index(arrays: dict[str, np.ndarray]) -> dict[str, list]:
    return {name: [x.dtype.name, list(x.shape), digest(x)] for name, x in arrays.items()}


def read_document(path: epath.Path) -> dict:
    """Read and verify the document of a checkpoint.

    Raises:
      DamagedError: there is none, or it is not what was written.
    """
    if not (path / COMMITTED).exists():
        raise DamagedError(f"{path}: the save was never committed ({COMMITTED} is missing)")
    sealed = _decode(path, [DOCUMENT])[DOCUMENT]
    if not isinstance(sealed, dict) or sealed.keys() != {"content", "digest"}:
        raise DamagedError(f"{path}: the document is not one of a checkpoint")
    if sealed["digest"] != _seal(sealed["content"]):
        raise DamagedError(f"{path}: the document differs from its digest")
    return sealed["content"]


def read_arrays(path: epath.Path, document: dict) -> Groups:
    """Read every array and compare it with its digest.

    Raises:
      DamagedError: naming the first array that is missing or altered.
    """
    index = document["arrays"]
    found = _decode(path, index)
    groups: Groups = {}
    for group, entries in index.items():
        groups[group] = {}
        for name, (dtype, shape, expected) in entries.items():
            array = found[group].get(name)
            if 0 in shape:
                array = np.zeros(shape, dtype)
            if array is None:
                raise DamagedError(f"{path}: {group}: {name} is missing")
            if array.dtype.name != dtype or list(array.shape) != shape or digest(array) != expected:
                raise DamagedError(f"{path}: {group}: {name} differs from its digest")
            groups[group][name] = array
    return groups


def _decode(path: epath.Path, names: Iterable[str]) -> dict[str, Any]:
    """Load some checkpointables as they were saved."""
    with _muted("asyncio"):
        try:
            with _context():
                return v1.load_checkpointables(path, dict.fromkeys(names))
        except Exception as error:
            # A damaged file can make the decoders below raise anything at all.
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        # Orbax leaves one failed task for every array behind; the first is reported below.
        gc.collect()
    raise DamagedError(f"{path}: {reason}")


@contextlib.contextmanager
def _muted(name: str) -> Iterator[None]:
    """Silence a logger."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


# -- a directory of steps ---------------------------------------------------------------------


def steps(directory: epath.Path) -> dict[int, epath.Path]:
    """Checkpoints in a directory by step, ascending; complete as far as their names tell."""
    found: dict[int, epath.Path] = {}
    for path in sorted(directory.iterdir(), key=lambda p: p.name) if directory.exists() else ():
        match = _STEP.fullmatch(path.name)
        # `7` sorts before `7.replaced`, which only counts when the replacement was never finished.
        if match:
            found.setdefault(int(match[1]), path)
    return dict(sorted(found.items()))


def leftovers(directory: epath.Path) -> list[tuple[int, epath.Path]]:
    """What interrupted saves and deletions have left behind: (step, path)."""
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
