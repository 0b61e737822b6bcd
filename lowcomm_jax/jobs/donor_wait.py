"""`DonorWait`: waits for a result of other regions, as long as one lives that can give it.

Which regions are dead, `heartbeat` decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from lowcomm_jax.rounds.remote import RemoteExchange
from lowcomm_jax.store.errors import Lost, StoreUnavailable

_GIVE_UP_SECONDS = 10.0
_POLL_SECONDS = 0.02
T = TypeVar("T")


class DonorWait:
    """Waits for donors, and gives up when none was seen for a while.

    The while covers short outages. Regions that ask for a state themselves are no donors, since
    they would wait for one another for ever.
    """

    def __init__(self, exchange: RemoteExchange):
        self._exchange = exchange
        self._seen = time.monotonic()

    def check(self, awaited: str) -> None:
        """Look for donors once.

        Raises:
          Lost: no donor was seen for 10 s; the message names what this region waits for
            (`awaited`).
        """
        now = time.monotonic()
        if self._exchange.donors():
            self._seen = now
        elif now > self._seen + _GIVE_UP_SECONDS:
            raise Lost(f"all other regions are gone before {awaited}: join again")

    def wait(self, awaited: str, look: Callable[[], T | None]) -> T:
        """Calls `look` until it returns something other than None, and returns that.

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
