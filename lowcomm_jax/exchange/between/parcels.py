"""What a region publishes for an exchange: bytes for everyone and, where payloads are reduced in
slices, a slice for each of the others."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lowcomm_jax.exchange.between import wire
from lowcomm_jax.exchange.between.commits import Payload
from lowcomm_jax.exchange.between.fetch import Piece
from lowcomm_jax.exchange.between.office import Office
from lowcomm_jax.exchange.between.request import Request
from lowcomm_jax.exchange.between.slices import Arrays, Reduction, name_of_slice, one_slice


@dataclasses.dataclass(frozen=True)
class Parcel:
    """One region's arrays on the host.

    Attributes:
      whole: all of them.
      rest: what everyone needs of them; slices: the others, `[parts, ...]`.
    """

    whole: Arrays
    rest: Arrays
    slices: Arrays


class Packed(NamedTuple):
    """A parcel as bytes.

    Attributes:
      payload: names them.
      data: for everyone.
      slices: by the region that reduces them.
    """

    payload: Payload
    data: bytes
    slices: dict[int, bytes]


def on_host(arrays: dict[str, Any], reduction: Reduction | None) -> Parcel:
    """The arrays once they are computed, in slices if they are reduced so."""
    host = {name: np.asarray(x) for name, x in arrays.items()}
    return Parcel(host, *((host, {}) if reduction is None else reduction.split(host)))


def pack(office: Office, name: str, parcel: Parcel) -> Packed:
    """As bytes that tell the run, the name of the exchange and the region."""
    data = wire.pack(office.run_id, name, office.region, parcel.rest)
    parts = len(next(iter(parcel.slices.values()), ()))
    slices = {
        s: wire.pack(
            office.run_id, name_of_slice(name, s), office.region, one_slice(parcel.slices, s)
        )
        for s in range(parts)
        if s != office.region
    }
    named = [_named(slices[s]) if s in slices else None for s in range(parts)]
    return Packed(Payload(wire.digest(data), len(data), tuple(named)), data, slices)


def publish(
    office: Office, key: str, packed: Packed, readers: Sequence[int], insist: Callable
) -> dict:
    """Hand it all to the transport, through `insist`; returns the hint for `Said`.

    Args:
      readers: regions that will fetch it at once; others can ask for it. Nobody else: what is
        offered and never pulled stays in memory.
    """
    pieces = [*packed.slices.values(), packed.data]
    sent = office.mishaps.sent(key, b"".join(pieces))
    ends = itertools.accumulate(map(len, pieces))
    *slices, data = [sent[end - len(x) : end] for end, x in zip(ends, pieces)]

    def put(payload: Payload, data: bytes, readers: Sequence[int]) -> dict:
        return insist(lambda: office.transport.put(payload.digest, data, readers))

    payload = packed.payload
    hints = {
        str(s): put(payload.slices[s], x, [s] if s in readers else [])
        for s, x in zip(packed.slices, slices)
    }
    hint = put(payload, data, readers)
    return {**hint, "slices": hints} if hints else hint


def pieces(
    request: Request,
    region: int,
    payload: Payload,
    like: wire.Shapes | None,
    hint: dict,
    slice_of: int | None,
) -> list[Piece]:
    """What to fetch of a region: what all need, and the slice that region `slice_of` reduces."""
    holders = [region, *(r for r in request.members if r != region)]
    whole = Piece(request.key, request.name, payload, like, holders, hint)
    if slice_of is None or request.reduction is None or not payload.slices[slice_of]:
        return [whole]
    return [whole, slice_piece(whole, request.reduction, slice_of)]


def slice_piece(whole: Piece, reduction: Reduction, number: int) -> Piece:
    """What to fetch of a region for its slice of this number, given what to fetch of it at all."""
    return Piece(
        whole.key,
        name_of_slice(whole.name, number),
        whole.payload.slices[number],
        reduction.like,
        whole.holders[:1],  # nobody else has any use for it
        whole.hint.get("slices", {}).get(str(number), {}),
    )


def _named(data: bytes) -> Payload:
    return Payload(wire.digest(data), len(data))
