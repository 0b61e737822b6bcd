"""`Fetch`: gets one region's payload in the background, until it is here or cancelled.

`pieces` says which bytes of the payload this region needs, and who may have them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lowcomm_jax.rounds.request import ExchangeRequest
from lowcomm_jax.store import wire
from lowcomm_jax.store.commits import Job
from lowcomm_jax.store.context import ExchangeContext, keep_looking
from lowcomm_jax.store.errors import Lost, Missing, Rejected
from lowcomm_jax.store.records import Payload

_DAMAGED_TRIES = 3


class PayloadPiece(NamedTuple):
    """Bytes to fetch.

    Attributes:
      key: of the exchange.
      payload: names them by their content.
      like: shapes they must hold; None = any.
      holders: the regions that may have them, tried in turn.
    """

    key: str
    payload: Payload
    like: wire.Shapes | None
    holders: Sequence[int]


def pieces(
    request: ExchangeRequest, region: int, payload: Payload, slice_of: int | None
) -> list[PayloadPiece]:
    """What to fetch of a region: what every region needs, and the slice that `slice_of` reduces."""
    holders = [region, *(r for r in request.members if r != region)]
    like = None if request.like is None else request.like[region]
    whole = PayloadPiece(request.key, payload, like, holders)
    if slice_of is None or request.reduction is None or not payload.slices[slice_of]:
        return [whole]
    return [whole, slice_piece(request, region, payload, slice_of)]


def slice_piece(
    request: ExchangeRequest, region: int, payload: Payload, number: int
) -> PayloadPiece:
    """What to fetch of a region for its slice of this number; nobody else has any use for it."""
    return PayloadPiece(request.key, payload.slices[number], request.reduction.like, [region])


class Fetch:
    """A payload on its way here, piece after piece.

    Attributes:
      job: whose payload it is.
      got: arrays of the pieces that have arrived and were verified, in their order.
      refused: why a piece does not fit this exchange; final, since pieces are named by content.
      moved: bytes that have arrived, and seconds that getting them took.

    An error of any other kind ends the whole exchange (`Heartbeat.fail`).
    """

    def __init__(
        self,
        context: ExchangeContext,
        job: Job,
        pieces: Sequence[PayloadPiece],
        news: threading.Event | None = None,
    ):
        """`news`: is set when this fetch is over."""
        self.job = job
        self.got: list[dict[str, np.ndarray]] = []
        self.refused: Rejected | None = None
        self.moved = (0, 0.0)
        self._context, self._pieces = context, pieces
        self._damaged = 0
        self._missing_since_s: float | None = None
        self._news, self._wake = news or threading.Event(), threading.Event()
        self._cancelled = False
        context.background.begin(f"fetch-{job.region}", self._retry, self.cancel)

    @property
    def payload(self) -> Payload:
        """The record of the first piece."""
        return self._pieces[0].payload

    @property
    def complete(self) -> bool:
        """Whether all pieces are here."""
        return len(self.got) == len(self._pieces)

    @property
    def missing_s(self) -> float | None:
        """For how long no reachable region has had the next piece; None = one may have it."""
        since_s = self._missing_since_s
        return None if since_s is None else self._context.heartbeat.clock_s - since_s

    @property
    def hopeless(self) -> bool:
        """Whether the payload is refused, or arrived damaged again and again."""
        return self.refused is not None or self._damaged >= _DAMAGED_TRIES

    def cancel(self) -> None:
        """Stop trying."""
        self._cancelled = True
        self._wake.set()

    def arrived(self) -> bool:
        """Whether the first piece of a payload that is agreed on is here.

        Raises:
          Rejected: the piece does not fit this exchange.
          Lost: no reachable region has had it for a while.
        """
        if self.got:
            return True
        if self.refused is not None:
            raise self.refused
        if self.missing_s is not None and self.missing_s > 2 * self._context.timing.answer_s:
            raise Lost(
                f"the payload of region {self.job.region} for {self._pieces[0].key!r} is agreed "
                "on, but gone with all who had it: join again, and continue from the state of "
                "another region"
            )
        return False

    def _retry(self) -> None:
        what = f"payload of region {self.job.region} for {self._pieces[0].key}"
        keep_looking(what, self._try, self._over, self._wake, self._context.store.pauses)
        if self.complete or self.refused is not None:
            self._context.pace.transferred(*self.moved)
            self._news.set()

    def _over(self) -> bool:
        return self._cancelled or self.complete or self.refused is not None

    def _try(self) -> bool:
        """Get the pieces that are not here yet; returns False: each pause is longer."""
        try:
            for piece in self._pieces[len(self.got) :]:
                data = self._bytes(piece)
                try:
                    arrays = wire.unpack(data, self._context.run_id, self.job, piece.like)
                except Rejected as error:
                    self._context.counter.add("rejected_content")
                    self.refused = error
                    return False
                self._context.transport.keep(piece.payload.digest, data)
                self.got.append(arrays)
        except (Missing, Rejected) as error:
            if isinstance(error, Rejected):
                self._context.counter.add("rejected_damaged")
                self._damaged += 1
            if self._missing_since_s is None:
                self._missing_since_s = self._context.heartbeat.clock_s
        return False

    def _bytes(self, piece: PayloadPiece) -> bytes:
        context, payload = self._context, piece.payload
        began = time.monotonic()
        data = context.transport.get(payload.digest, payload.nbytes, piece.holders)
        context.fault_hooks.received(piece.key, len(data))
        if wire.digest(data) != payload.digest:
            raise Rejected(f"the bytes received for payload {payload.digest} are damaged")
        self._missing_since_s = None
        nbytes, seconds = self.moved
        self.moved = nbytes + len(data), seconds + time.monotonic() - began
        return data
