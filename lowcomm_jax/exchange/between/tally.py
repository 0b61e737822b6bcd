"""Counters that several threads add to."""

from __future__ import annotations

import collections
import threading


class Tally:
    """Named whole numbers, 0 until something is added."""

    def __init__(self):
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Add to one of the numbers."""
        with self._lock:
            self._counts[name] += amount

    def take(self, name: str) -> int:
        """What was added since it was last taken."""
        with self._lock:
            taken = f"{name} taken"
            new = self._counts[name] - self._counts[taken]
            self._counts[taken] += new
            return new

    def read(self) -> dict[str, int]:
        """All numbers."""
        with self._lock:
            return {k: v for k, v in self._counts.items() if not k.endswith(" taken")}
