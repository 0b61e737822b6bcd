"""The final state of a run, kept in the store for regions that come back after the end.

Regions that train give their state to one that returns (`StateTransfer`). With no region left, one
that returns would begin the run anew, by itself. So regions that end while another one is absent
leave their final state in the store.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lowcomm_jax.runtime import records, wire
from lowcomm_jax.runtime.context import ExchangeContext
from lowcomm_jax.runtime.errors import Rejected
from lowcomm_jax.runtime.state_transfer import CHUNK_BYTES, State, document, restored


def leave(context: ExchangeContext, state: State) -> None:
    """Write a state, unless another region has: its pieces, named by content, then the record.

    Raises:
      StoreUnavailable: try again later.
    """
    if stands(context):
        return
    step, arrays, about = state
    listed = {name: _put(context, np.asarray(x)) for name, x in arrays.items()}
    shapes = wire.shapes_of(arrays)
    body = {
        "step": step,
        "arrays": {name: [*shapes[name], listed[name]] for name in arrays},
        "document": about,
    }
    key = _key(context)
    context.store.create(key, context.seal.close(key, body))


def stands(context: ExchangeContext, epoch: int | None = None) -> bool:
    """Whether an epoch's result was left: of ours, if none is given.

    Raises:
      StoreUnavailable: try again later.
    """
    return _record(context, epoch) is not None


def take(context: ExchangeContext) -> State | None:
    """The result of our epoch; None = none was left.

    Raises:
      Rejected: a piece of it is damaged or gone.
      StoreUnavailable: try again later.
    """
    body = _record(context, None)
    if body is None:
        return None
    arrays = {}
    for name, (dtype, shape, listed) in body["arrays"].items():
        data = b"".join(_get(context, *piece) for piece in listed)
        arrays[name] = restored(name, data, dtype, shape)
    return body["step"], arrays, body["document"]


def _key(context: ExchangeContext, epoch: int | None = None) -> str:
    return f"result/{context.heartbeat.own.epoch if epoch is None else epoch}"


def _record(context: ExchangeContext, epoch: int | None) -> dict | None:
    key = _key(context, epoch)
    data = context.store.read(key)
    try:
        return None if data is None else context.seal.open(key, data, _left)
    except Rejected:
        context.counter.add("rejected_record")
        return None


def _left(value: Any) -> dict:
    piece = records.row(records.text, records.size)
    return records.fields(
        value, step=records.whole, arrays=records.arrays(piece), document=document
    )


def _put(context: ExchangeContext, array: np.ndarray) -> list[list]:
    """Write an array; [SHA-256, bytes] of each piece."""
    data, listed = wire.raw(array).tobytes(), []
    for start in range(0, len(data), CHUNK_BYTES):
        piece = data[start : start + CHUNK_BYTES]
        digest = wire.digest(piece)
        context.store.write(f"{_key(context)}.{digest}", piece)
        listed.append([digest, len(piece)])
    return listed


def _get(context: ExchangeContext, digest: str, nbytes: int) -> bytes:
    data = context.store.read(f"{_key(context)}.{digest}", nbytes)
    if data is None or wire.digest(data) != digest:
        raise Rejected(f"the run has ended, and a piece of its result ({digest}) is damaged")
    return data
