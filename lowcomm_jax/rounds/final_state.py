"""The final state of a run, kept in the store for regions that come back after the end.

Regions that train give their state to one that returns (`StateTransfer`). With no region left, one
that returns would begin the run anew, by itself. So regions that end while another one is absent
leave their final state in the store.
"""

from __future__ import annotations

from lowcomm_jax.rounds.state_transfer import State, from_record, in_pieces
from lowcomm_jax.store.context import ExchangeContext
from lowcomm_jax.store.errors import Rejected
from lowcomm_jax.store.records import State as StateRecord


def leave(context: ExchangeContext, state: State) -> None:
    """Write a state, unless another region has: its pieces, named by content, then the record.

    Raises:
      StoreUnavailable: try again later.
    """
    if stands(context):
        return
    step, arrays, document = state
    slot, job = _slot(context), context.heartbeat.job

    def put(digest: str, piece: bytes) -> None:
        context.store.write(f"{slot}/{digest}", piece)

    pieces = {name: in_pieces(x, put) for name, x in arrays.items()}
    context.slots.create(slot, StateRecord(step, *job, {}, pieces, document))


def stands(context: ExchangeContext, epoch: int | None = None) -> bool:
    """Whether an epoch's result was left: of ours, if none is given.

    Raises:
      StoreUnavailable: try again later.
    """
    return context.slots.first(_slot(context, epoch), StateRecord) is not None


def take(context: ExchangeContext) -> State | None:
    """The result of our epoch; None = none was left.

    Raises:
      Rejected: a piece of it is damaged or gone.
      StoreUnavailable: try again later.
    """
    slot = _slot(context)
    record = context.slots.first(slot, StateRecord)

    def get(digest: str, nbytes: int) -> bytes:
        data = context.store.read(f"{slot}/{digest}", nbytes)
        if data is None:
            raise Rejected(f"the run has ended, and a piece of its result ({digest}) is gone")
        return data

    return None if record is None else from_record(record, get)


def _slot(context: ExchangeContext, epoch: int | None = None) -> str:
    return f"result/{context.heartbeat.own.epoch if epoch is None else epoch}"
