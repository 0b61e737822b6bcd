"""Cached folders: built once, whole or not there at all, and rebuilt when damaged.

A cache is never needed: where it cannot be written, one line says so, and a temporary folder of
this user's takes its place.
"""

import functools
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

_log = logging.getLogger(__name__)
_SIZES = "sizes.json"


def cache_folder(cache_dir: str | os.PathLike[str] | None) -> Path:
    """Return the cache folder: the one given, else `lowcomm_jax` in the user's cache folder.

    Without a home folder to find it by, it is the temporary one of this user's.
    """
    usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "lowcomm_jax")
    folder = usual if cache_dir is None else Path(cache_dir)
    try:
        return folder.expanduser()
    except RuntimeError:  # HOME is not set, and the user has no entry
        return _instead(folder, "this user has no home folder")


def open_or_build(cache: Path, name: str, build: Callable[[Path], None]) -> Path:
    """Return the folder `name` of a cache, built by `build(empty_folder)` if it is not there yet.

    The build happens in a temporary folder beside it that is renamed when all its files are on
    disk. A process that is killed half-way therefore leaves no folder; of two processes that build
    at the same time, both read the files of the first to rename. A folder whose files do not have
    the sizes recorded at build time is reported in the log and built anew.

    Where the cache cannot be written, what it holds is read. What it lacks is built in a temporary
    folder of this user's, and the log says so once.

    Raises:
        ValueError: there is no temporary folder either.
    """
    path = cache / name
    try:
        if path.is_dir():
            damage = _damage(path)
            if damage is None:
                return path
            _log.warning("cache folder %s is damaged (%s); it is built anew", path, damage)
            shutil.rmtree(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        return open_or_build(_instead(cache, error.strerror), name, build)
    try:
        build(temporary)
        _seal(temporary)
        _move(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path


@functools.cache
def _instead(cache: Path, reason: str) -> Path:
    """A temporary folder of this user's, in place of a cache that cannot be written."""
    fix = "give data.cache_dir, or XDG_CACHE_HOME, a folder that can be written"
    what = f"the cache {cache} cannot be written ({reason})"
    try:
        folder = Path(tempfile.gettempdir(), f"lowcomm_jax-{os.getuid()}")
        if cache == folder:
            raise FileNotFoundError
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            folder = Path(tempfile.mkdtemp(prefix="lowcomm_jax-"))  # the name is another user's
    except OSError as error:
        raise ValueError(f"{what}, nor is there a temporary folder; {fix}") from error
    _log.warning("%s; %s takes its place: %s", what, folder, fix)
    return folder


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
