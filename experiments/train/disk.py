"""Full disks: one line says so, before a checkpoint begins where the free space is known."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.progress import size
from lowcomm_jax.mesh.leader import leader

EXIT_FULL = 74
"""Of a command that ended because a disk was full; `EX_IOERR` of sysexits.h."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_SAID = ("No space left on device", "Disk quota exceeded")


class FullDiskError(Exception):
    """A disk has no room for what was to be written.

    Args:
      what: a sentence on what was to be written, and where.
      steps: steps of the complete checkpoints; None = not known.
    """

    def __init__(self, what: str, steps: Sequence[int] | None):
        if steps is None:
            safe = "checkpoints that were complete are safe"
        else:
            safe = f"that of step {steps[-1]} is safe" if steps else "none is there yet"
        super().__init__(f"{what}; {safe}. Make room, then run the same command to continue")


@contextlib.contextmanager
def room(folder: Path, state: Any, steps: Sequence[int]) -> Iterator[None]:
    """A context in which a state is saved.

    Args:
      state: that is saved; the sizes of its arrays are checked before.
      steps: steps of the complete checkpoints.

    Raises:
      FullDiskError: the disk has less room than the state's arrays need, or was filled meanwhile.
    """
    if not leader().leads:
        yield  # the folder may be another host's
        return
    arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array | np.ndarray)]
    needed = sum(x.nbytes for x in arrays)
    free = shutil.disk_usage(folder).free
    if free < needed:
        what = f"{folder}: a checkpoint needs {size(needed)}, and {size(free)} are free"
        raise FullDiskError(what, steps)
    try:
        yield
    except Exception as error:
        if not is_full(error):
            raise
        what = f"{folder}: a checkpoint of {size(needed)} filled the disk"
        raise FullDiskError(what, steps) from error


def is_full(error: BaseException) -> bool:
    """Whether an error, or one that caused it, says that a disk is full, by number or in words."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    led = error.__cause__ or error.__context__
    return any(x in str(error) for x in _SAID) or (led is not None and is_full(led))
