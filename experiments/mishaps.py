"""The faults of a script that a region's job does to itself: damaged, late and slow payloads."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence

from experiments.faults import Fault


class Scripted:
    """See `lowcomm_jax.exchange.between.mishaps.Mishaps`; steps are those of the send."""

    def __init__(self, faults: Sequence[Fault], region: int):
        self._faults = [fault for fault in faults if fault.region == region]
        self._link = threading.Lock()

    def sent(self, key: str, data: bytes) -> bytes:
        """Hold it up, or flip one bit, after its digest was taken."""
        for fault in self._of(key):
            if fault.kind == "late":
                time.sleep(fault.seconds)
            elif fault.kind == "slow":
                self._carry(fault, len(data))
            elif fault.kind == "corrupt":
                middle = len(data) // 2
                data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        return data

    def received(self, key: str, nbytes: int) -> None:
        """Hold it up."""
        for fault in self._of(key):
            if fault.kind == "slow":
                self._carry(fault, nbytes)

    def _of(self, key: str) -> list[Fault]:
        """Faults at the step in which a payload was sent: key "fragment@step..."."""
        found = re.match(r"\d+@(\d+)", key)
        return [f for f in self._faults if found and f.step <= int(found[1]) < f.end]

    def _carry(self, fault: Fault, nbytes: int) -> None:
        """One payload after the other, as over a link."""
        with self._link:
            time.sleep(8 * nbytes / (1e6 * fault.mbit))
