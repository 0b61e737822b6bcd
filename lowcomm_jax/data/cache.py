"""Cached folders: built once, whole or not there at all, and rebuilt when damaged."""

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

_log = logging.getLogger(__name__)
_SIZES = "sizes.json"


def open_or_build(path: Path, build: Callable[[Path], None]) -> Path:
    """Return the folder `path`, built by `build(empty_folder)` if it is not there yet.

    The build happens in a temporary folder beside `path` that is renamed when all its files are on
    disk. A process that is killed half-way therefore leaves no `path`; of two processes that build
    at the same time, both read the files of the first to rename. A folder whose files do not have
    the sizes recorded at build time is reported in the log and built anew.
    """
    if path.is_dir():
        damage = _damage(path)
        if damage is None:
            return path
        _log.warning("cache folder %s is damaged (%s); it is built anew", path, damage)
        shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        build(temporary)
        _seal(temporary)
        _move(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path


def _move(temporary: Path, path: Path) -> None:
    try:
        os.rename(temporary, path)
    except OSError:
        # Another process finished first: its folder is complete, ours is dropped by the caller.
        if not path.is_dir():
            raise


def _seal(folder: Path) -> None:
    sizes = {item.name: item.stat().st_size for item in sorted(folder.iterdir())}
    (folder / _SIZES).write_text(json.dumps(sizes))
    for item in folder.iterdir():
        with open(item, "rb") as handle:
            os.fsync(handle.fileno())


def _damage(folder: Path) -> str | None:
    record = folder / _SIZES
    if not record.is_file():
        return f"{_SIZES} is missing"
    for name, size in json.loads(record.read_text()).items():
        item = folder / name
        if not item.is_file():
            return f"{name} is missing"
        if item.stat().st_size != size:
            return f"{name} has {item.stat().st_size} bytes instead of {size}"
    return None
