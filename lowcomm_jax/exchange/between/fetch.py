"""Fetches one payload on a thread of its own, until it is here, hopeless or not needed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import numpy as np

from lowcomm_jax.exchange.between import wire
from lowcomm_jax.exchange.between.commits import Payload
from lowcomm_jax.exchange.between.errors import Missing, Rejected, StoreUnavailable
from lowcomm_jax.exchange.between.office import Office

_DAMAGED_TRIES = 3
_PATIENCE_S = 10.0
log = logging.getLogger(__name__)


class Fetch:
    """A payload on its way here.

    Attributes:
      region, payload: whose, and which.
      arrays: what it holds, once it is here and verified.
      refused: why it is not what this exchange needs; final, since it is named by its content.

    An error of any other kind ends the whole exchange (`Beats.fail`).
    """

    def __init__(
        self,
        office: Office,
        key: str,
        name: str,
        region: int,
        payload: Payload,
        like: wire.Shapes | None,
        holders: Sequence[int],
        hint: dict,
    ):
        self.region, self.payload = region, payload
        self.arrays: dict[str, np.ndarray] | None = None
        self.refused: Rejected | None = None
        self._office, self._like = office, like
        self._key, self._name = key, name
        self._holders, self._hint = holders, hint
        self._damaged = 0
        self._missing_since_s: float | None = None
        self._finished = threading.Event()
        self._cancelled = threading.Event()
        name = f"lowcomm-fetch-{region}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def missing_s(self) -> float | None:
        """For how long nobody who could be reached has had it; None = somebody may."""
        since_s = self._missing_since_s
        return None if since_s is None else self._office.beats.clock_s - since_s

    @property
    def hopeless(self) -> bool:
        """Whether it is refused, or arrived damaged again and again."""
        return self.refused is not None or self._damaged >= _DAMAGED_TRIES

    def cancel(self) -> None:
        """Stop trying."""
        self._cancelled.set()

    @property
    def running(self) -> bool:
        """Whether its thread still is."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for the thread, which is cancelled or done."""
        self._thread.join(_PATIENCE_S)

    def wait(self, seconds: float) -> None:
        """Wait until it is here or refused, or so long."""
        self._finished.wait(seconds)

    def _run(self) -> None:
        try:
            self._insist()
        except Exception as error:
            self._office.beats.fail(error)

    def _insist(self) -> None:
        for pause in self._office.store.pauses():
            if self._cancelled.is_set():
                return
            try:
                self._try()
            except StoreUnavailable as error:
                # The heartbeat reports an outage, but knows nothing of what is too large.
                log.info("payload of region %d for %s: %s", self.region, self._key, error)
            except (Missing, Rejected) as error:
                if isinstance(error, Rejected):
                    self._office.tally.add("rejected_damaged")
                    self._damaged += 1
                if self._missing_since_s is None:
                    self._missing_since_s = self._office.beats.clock_s
            if self.arrays is not None or self.refused is not None:
                self._finished.set()
                return
            self._cancelled.wait(pause)

    def _try(self) -> None:
        office, payload = self._office, self.payload
        began = time.monotonic()
        data = office.transport.get(payload.digest, payload.nbytes, self._holders, self._hint)
        office.mishaps.received(self._key, len(data))
        if wire.digest(data) != payload.digest:
            raise Rejected(f"what came for {payload.digest} was damaged")
        self._missing_since_s = None
        office.pace.moved(len(data), time.monotonic() - began)
        try:
            arrays = wire.unpack(
                data, run_id=office.run_id, key=self._name, region=self.region, like=self._like
            )
        except Rejected as error:
            office.tally.add("rejected_content")
            self.refused = error
            return
        office.transport.keep(payload.digest, data)
        self.arrays = arrays
