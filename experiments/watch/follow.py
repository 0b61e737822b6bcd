"""Read what is new in a metrics file that is being written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from experiments.metrics import record_of


class Follower:
    """The records of one file, as they come.

    Attributes:
      restarted: the last `read` began anew: the file was replaced, as by a run that continues.
      changed: when the file was last written, in seconds since 1970; 0 before it is there.
    """

    def __init__(self, path: Path):
        self.path, self.restarted, self.changed = path, False, 0.0
        self._identity: tuple[int, int] | None = None
        self._offset, self._line = 0, 0

    def read(self) -> list[dict[str, Any]]:
        """All whole records since the last call; a line that is being written waits.

        Raises:
          ValueError: a whole line that is no record.
        """
        self.restarted = False
        try:
            with self.path.open("rb") as file:
                return self._new(file)
        except FileNotFoundError:
            return []

    def _new(self, file) -> list[dict[str, Any]]:
        found = os.fstat(file.fileno())
        identity = (found.st_dev, found.st_ino)
        if identity != self._identity or found.st_size < self._offset:
            self.restarted = self._identity is not None
            self._identity, self._offset, self._line = identity, 0, 0
        self.changed = found.st_mtime
        file.seek(self._offset)
        whole, _, _ = file.read().rpartition(b"\n")
        if not whole:
            return []
        self._offset += len(whole) + 1
        try:
            lines = whole.decode("utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: no text ({error})") from error
        first, self._line = self._line + 1, self._line + len(lines)
        return [record_of(line, f"{self.path}, line {n}") for n, line in enumerate(lines, first)]
