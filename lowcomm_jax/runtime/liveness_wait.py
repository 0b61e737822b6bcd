"""Whether a region that waits for the others still has any that could help it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from lowcomm_jax.runtime.connect import JobExchange
from lowcomm_jax.runtime.errors import Lost, StoreUnavailable

_ALONE_SECONDS = 10.0
_POLL_SECONDS = 0.02
T = TypeVar("T")


class LivenessWait:
    """Gives up on the others when nobody was seen for a while: they may be cut off for a moment.

    Those that ask for a state themselves are no help: they would wait for one another for ever.
    """

    def __init__(self, exchange: JobExchange):
        self._exchange = exchange
        self._seen = time.monotonic()

    def check(self, awaited: str) -> None:
        """
        Raises:
          Lost: all others are gone; `awaited` says before what.
        """
        now = time.monotonic()
        if self._exchange.donors():
            self._seen = now
        elif now > self._seen + _ALONE_SECONDS:
            raise Lost(f"all other regions are gone before {awaited}: join again")

    def wait(self, awaited: str, look: Callable[[], T | None]) -> T:
        """What `look` finds, as soon as it does.

        Raises:
          Lost: see `check`.
        """
        while True:
            self.check(awaited)
            try:
                found = look()
            except StoreUnavailable:
                found = None  # the exchange's heartbeat reports it
            if found is not None:
                return found
            time.sleep(_POLL_SECONDS)
