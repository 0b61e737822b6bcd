"""What cannot be written: one line says so, before a checkpoint begins where sizes tell."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.cli import EndedError
from experiments.progress import size
from lowcomm_jax.mesh.leader import leader

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE, errno.EFBIG)


class NotSavedError(EndedError):
    """Something could not be written, since a disk is full or a folder takes no files.

    Args:
      what: a sentence on what was to be written, and where.
      fix: what the user does about it.
      steps: steps of the complete checkpoints; None = not known.
    """

    code = os.EX_IOERR

    def __init__(self, what: str, fix: str = "Make room", steps: Sequence[int] | None = None):
        if steps is None:
            safe = "checkpoints that were complete are safe"
        else:
            safe = f"that of step {steps[-1]} is safe" if steps else "none is there yet"
        super().__init__(f"{what}; {safe}. {fix}, then run the same command to continue")


def require_room(folder: Path, state: Any, steps: Sequence[int]) -> None:
    """Return where a state can be saved, as far as sizes tell.

    Args:
      state: that is to be saved.
      steps: steps of the complete checkpoints.

    Raises:
      NotSavedError: the disk has less room than the state's arrays need.
    """
    if not leader().leads:
        return  # the folder may be another host's
    arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array | np.ndarray)]
    needed = sum(x.nbytes for x in arrays)
    free = shutil.disk_usage(folder).free
    if free < needed:
        what = f"{folder}: a checkpoint needs {size(needed)}, and {size(free)} are free"
        raise NotSavedError(what, steps=steps)


@contextlib.contextmanager
def written(folder: Path, steps: Sequence[int]) -> Iterator[None]:
    """A context in which a checkpoint is written, or awaited.

    Args:
      steps: steps of the complete checkpoints.

    Raises:
      NotSavedError: a file could not be written.
    """
    try:
        yield
    except Exception as error:  # writers wrap what the disk says in types of their own
        if is_full(error):
            raise NotSavedError(f"{folder}: a checkpoint filled the disk", steps=steps) from error
        if (reason := _said(error, _REFUSED)) is None:
            raise
        what = f"{folder}: a checkpoint cannot be written ({reason})"
        raise NotSavedError(what, "Make the folder writable", steps) from error


def is_full(error: BaseException) -> bool:
    """Whether an error, or one that caused it, says that a disk is full, by number or in words."""
    return _said(error, _FULL) is not None


def _said(error: BaseException, numbers: Sequence[int]) -> str | None:
    """What the system says of the first of these that an error, or one that caused it, is of."""
    for number in numbers:
        words = os.strerror(number)
        if (isinstance(error, OSError) and error.errno == number) or words in str(error):
            return words
    led = error.__cause__ or error.__context__
    return None if led is None else _said(led, numbers)
