"""Whether a region that waits for the others still has any that could help it."""

from __future__ import annotations

import time

from lowcomm_jax.exchange.between.errors import Lost
from lowcomm_jax.exchange.between.remote import RemoteExchange

_ALONE_SECONDS = 10.0


class Company:
    """Gives up on the others when nobody was seen for a while: they may be cut off for a moment.

    Those that ask for a state themselves are no help: they would wait for one another for ever.
    """

    def __init__(self, exchange: RemoteExchange):
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
