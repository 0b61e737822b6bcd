"""Faults that a region's job injects into itself: damaged, old, late, slow payloads, slow steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from experiments.faults.fault import Fault
from lowcomm_jax.store.context import FaultHooks

_REMEMBERED = 1000  # exchanges: more than are under way at once


class ScriptedFaults(FaultHooks):
    """Faults of a script; a payload's step is that of its send.

    Attributes:
      began: Unix time in seconds at which the run began (`origin`); None = it has not begun.
      not_finite: called with the step after which parameters stopped being finite (`NotFinite`);
        None = nobody is called.
    """

    def __init__(self, faults: Sequence[Fault], region: int):
        self._faults = [fault for fault in faults if fault.region == region]
        self._link = threading.Lock()
        self._steps: dict[str, int] = {}  # of the newest exchanges, in the order they began
        self._noting = threading.Lock()
        self._replays = any(fault.kind == "replay" for fault in self._faults)
        self._before: dict[int, bytes] = {}  # the newest payload, by its size
        self.began: float | None = None
        self.not_finite: Callable[[int], None] | None = None

    def begins(self, key: str, terms: Mapping[str, int | str]) -> None:
        """Remember the step of an exchange that sends something."""
        if "step" not in terms:
            return
        with self._noting:
            self._steps[key] = int(terms["step"])
            if len(self._steps) > _REMEMBERED:
                del self._steps[next(iter(self._steps))]

    def sent(self, key: str, data: bytes) -> bytes:
        """Delay a payload, or replace it after its digest was taken; returns the bytes to send.

        Replaced are one bit of it, or all of it by an older one of its size (zeros before that).
        """
        before = self._before.get(len(data), bytes(len(data)))
        if self._replays:
            self._before[len(data)] = data
        for fault in self._of(key):
            if fault.kind == "late":
                time.sleep(fault.delay)
            elif fault.kind == "slow":
                self._hold_link(fault, len(data))
            elif fault.kind == "corrupt":
                middle = len(data) // 2
                data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
            elif fault.kind == "replay":
                data = before
        return data

    def steps(self, step: int) -> None:
        """Delay this inner step."""
        for fault in self._on(step):
            if fault.kind == "straggle":
                time.sleep(fault.delay)

    def received(self, key: str, nbytes: int) -> None:
        """Delay a payload that has arrived."""
        for fault in self._of(key):
            if fault.kind == "slow":
                self._hold_link(fault, nbytes)

    def _of(self, key: str) -> list[Fault]:
        """Faults that are on when a payload is sent."""
        step = self._steps.get(key.partition("/")[0])
        return [] if step is None else self._on(step)

    def _on(self, step: int) -> list[Fault]:
        seconds = None if self.began is None else time.time() - self.began
        return [fault for fault in self._faults if fault.on(step, seconds)]

    def _hold_link(self, fault: Fault, nbytes: int) -> None:
        """Delay a payload as a slow link would; payloads share the link one after the other."""
        with self._link:
            time.sleep(8 * nbytes / (1e6 * fault.mbit))
