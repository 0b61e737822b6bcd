"""`LoopbackExchange`: an exchange without other regions, for compiling before a region joins."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from lowcomm_jax.rounds import payloads
from lowcomm_jax.rounds.request import Arrived, arrange
from lowcomm_jax.rounds.slicing import Slicing
from lowcomm_jax.store.wire import shapes_of


class LoopbackExchange:
    """What `JobCarrier` needs of a `RemoteExchange`: every other region sends what this one does.

    An exchange is over when it begins, so that nothing is waited for, and nobody is told of it
    (`JobCarrier.alone`). `RemoteExchange` documents the methods. In a job of several processes
    each process has its own.
    """

    def __init__(self, region: int, count: int):
        self.region, self.count = region, count
        self._open: dict[str, tuple[payloads.HostPayload, Slicing | None]] = {}
        self._early: dict[str, dict[str, Any]] = {}

    def start(
        self,
        key: str,
        arrays: dict[str, Any],
        *,
        reduction: Slicing | None = None,
        early: str | None = None,
        **_: Any,
    ) -> None:
        here = arrays if early is None else arrays | self._early.pop(early)
        self._open[key] = payloads.on_host(here, reduction), reduction

    def send_early(self, key: str, arrays: dict[str, Any], **_: Any) -> None:
        self._early[key] = {name: np.asarray(x) for name, x in arrays.items()}

    def ready(self, key: str) -> bool:
        return key in self._open

    def finish(self, key: str) -> Arrived:
        host_payload, reduction = self._open.pop(key)
        rest = dict.fromkeys(range(self.count), host_payload.rest)
        reduced = None
        if reduction is not None:
            slices = dict.fromkeys(range(self.count), host_payload.slices)
            # On another thread, as in an exchange: JAX keys compiled programs by a thread's
            # settings.
            with ThreadPoolExecutor(1) as pool:
                reduced = pool.submit(reduction.average_all, slices, rest).result()
        shapes = shapes_of(host_payload.rest)
        return arrange(rest, shapes, self.count, ours=True, reduced=reduced)

    def rounds(
        self, admission: Any, most: int, overlap: int, like_K: Any, first: int
    ) -> LoopbackRounds:
        del admission, most, overlap, like_K
        return LoopbackRounds(self, first)


class LoopbackRounds:
    """What `RoundCarrier` needs of a `RoundExchange`: a round is over when it is reported to."""

    def __init__(self, exchange: LoopbackExchange, first: int):
        self.committed = first
        self.newest = first - 1
        self._exchange = exchange

    def report(self, number: int, arrays: dict[str, Any], terms: Any, step: int) -> None:
        del terms, step
        self._exchange.start(str(number), arrays)
        self.newest, self.committed = number, number + 1

    def names_ours(self, number: int) -> bool | None:
        return True if number < self.committed else None

    def take(self, number: int, ours: Any) -> Arrived:
        del ours  # there is nobody else
        return self._exchange.finish(str(number))

    def seen(self) -> tuple[int, int]:
        return self.committed, self.newest

    stepped = seen
