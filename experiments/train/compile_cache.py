"""JAX's persistent compilation cache: a second start takes its programs from disk."""

from __future__ import annotations

import hashlib
import logging
import platform
import tempfile
from pathlib import Path

import jax

from lowcomm_jax.data.cache import cache_folder

log = logging.getLogger(__name__)


def default_folder() -> Path:
    """`xla/<machine>` in the user's cache folder of this project.

    The name holds a digest of the CPU's features, so that machines of different kinds with one home
    folder do not load each other's code.
    """
    features = platform.machine() + platform.processor()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        features += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return cache_folder(None) / "xla" / hashlib.sha256(features.encode()).hexdigest()[:12]


def enable(folder: str | None) -> None:
    """Keep all compiled programs in `folder`: None = `default_folder()`, "off" = nowhere.

    Where it cannot be written, one line says so, and nothing is kept.
    """
    if folder == "off":
        return
    path = default_folder() if folder is None else cache_folder(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        fix = "give --compile_cache a folder that can be written, or off"
        log.warning("compiled programs are not kept in %s (%s): %s", path, error.strerror, fix)
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
