"""`StateTransfer`: gives a region that comes back the state of one that trained on.

Before a newcomer starts from it, its anchor is compared with those of all regions that train
(`StateTransfer.anchors_agree`). While a region asks, their heartbeats carry the digests of the
newest anchors that they have had. Of an older one they tell once the newcomer names its version.

With no region left, one that returns would begin the run anew, by itself. So regions that end while
another one is absent leave their final state in the store (`leave_result`).

A donor removes its older states. The states of a donor that died are removed by the job that takes
its place, or while there is none, by the lowest living region. Nobody removes them while a region
may fetch them.
"""

from __future__ import annotations

import itertools
import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import msgspec
import numpy as np

from lowcomm_jax.store import terms, wire
from lowcomm_jax.store.context import ExchangeContext, check_open
from lowcomm_jax.store.errors import Missing, Rejected, StoreUnavailable
from lowcomm_jax.store.records import Array
from lowcomm_jax.store.records import State as StateRecord
from lowcomm_jax.store.transport import StoreTransport, Transport

CHUNK_BYTES = 64 << 20

_KEPT = 2

_FETCHED_AFTER_S = 30.0

_PIECE = re.compile(r"blob/\d+\.\d+\.(\d+)\.\d+\.\d+\.[0-9a-f]{64}")
"""Key of a piece of a state: epoch, position, donor, its incarnation, how many it has given before,
and the digest."""

_TOLD = 64
"""So many versions a heartbeat tells of, besides those that newcomers name."""

_REMEMBERED = 4096  # of a few hundred bytes each

log = logging.getLogger(__name__)

State = tuple[int, dict[str, np.ndarray], dict[str, Any]]
"""Step, arrays, document."""

AnchorVersions = Mapping[str, Mapping[str, Any]]
"""Terms (`terms`) by version, in the order of landings; see `anchor_history.anchor_version`."""


class _Flight(msgspec.Struct):
    """What is read of a payload in flight; its record has more."""

    key: str
    fragment: int
    moved: bool


class _Document(msgspec.Struct):
    """What is read of a document; it has more."""

    in_flight: list[_Flight] = []


def in_pieces(array: Any, put: Callable[[str, bytes], None]) -> Array:
    """An array's record, once `put(digest, bytes)` was called with each of its pieces."""
    host, pieces = np.asarray(array), []
    data = host.tobytes()  # in C order
    for start in range(0, len(data), CHUNK_BYTES):
        piece = data[start : start + CHUNK_BYTES]
        put(digest := wire.digest(piece), piece)
        pieces.append((digest, len(piece)))
    [(dtype, shape)] = wire.shapes_of({"an array of a state": host}).values()
    return Array(wire.NAMES[dtype], shape, tuple(pieces))


def write_state(
    context: ExchangeContext,
    slot: str,
    state: State,
    asked: dict[int, int],
    transport: Transport,
) -> StateRecord:
    """Write a state into a slot, its pieces first; returns its record.

    Args:
      asked: incarnations of the regions that had asked.
      transport: publishes the pieces.
    """
    step, arrays, document = state

    def put(digest: str, piece: bytes) -> None:
        transport.put(_piece(slot, digest), piece)

    pieces = {name: in_pieces(x, put) for name, x in arrays.items()}
    record = StateRecord(step, *context.heartbeat.job, asked, pieces, document)
    context.slots.create(slot, record)
    return record


def read_state(slot: str, record: StateRecord, transport: Transport) -> State:
    """The state of a record that was read in this slot.

    Args:
      transport: fetches the pieces.

    Raises:
      Rejected: a piece is damaged, or the pieces are not those of such an array.
      Missing: a piece cannot be had; and what else `transport` raises.
    """

    def whole(name: str, array: Array) -> np.ndarray:
        pieces = [(_piece(slot, digest), nbytes) for digest, nbytes in array.pieces]
        data = [transport.get(*piece, [record.donor]) for piece in pieces]
        if [wire.digest(x) for x in data] != [digest for digest, _ in array.pieces]:
            raise Rejected(f"a piece of array {name} of a state was damaged")
        try:
            return wire.restore(b"".join(data), array.dtype, array.shape)
        except (ValueError, TypeError) as error:
            raise Rejected(f"array {name} of a state: {error}") from None

    try:
        msgspec.convert(record.document, _Document)
    except msgspec.ValidationError as error:
        raise Rejected(f"the document of a state: {error}") from None
    arrays = {name: whole(name, array) for name, array in record.arrays.items()}
    return record.position, arrays, record.document


def _pieces(record: StateRecord) -> list[tuple[str, int]]:
    """(digest, bytes) of each piece of a state."""
    return [piece for array in record.arrays.values() for piece in array.pieces]


def _piece(slot: str, digest: str) -> str:
    """Name of a piece of the state in this slot: no state shares one with another."""
    return f"{slot.removeprefix('state/').replace('/', '.')}.{digest}"


class StateTransfer:
    """Gives and takes states: records that are created once, arrays in pieces named by content.

    Methods that read the store raise `Unreadable` where a signed record of a state is none.
    """

    def __init__(self, context: ExchangeContext):
        self._context = context
        self._count = 0  # of the states that this job has begun to give
        # Until when each incarnation of a region is owed nothing, on the heartbeat's clock.
        self._served: dict[tuple[int, int], float] = {}
        self._given: deque[tuple[str, StateRecord]] = deque()  # by slot
        self._giving: threading.Thread | None = None
        self._busy = threading.Lock()  # with giving, or with removing
        self._swept_for: set[int] | None = None  # who lived when nothing of the dead was left
        # Terms of the anchors we have had while a region asked, by version, in their order.
        self._had: dict[str, terms.Terms] = {}

    def give_soon(self, step: int, arrays: dict[str, np.ndarray], document: dict[str, Any]) -> None:
        """Call `give` in the background, so that training goes on meanwhile.

        Nothing is given where nobody asks any more by then.
        """

        def act() -> None:
            try:
                if self.asking():
                    self.give(step, arrays, document)
            except StoreUnavailable as error:
                self._owe_nothing(self.asking(), self._context.timing.answer_s)
                log.warning("no state was given, it is tried again: %s", error)

        self._giving = self._context.background.begin("give", act, serves=True)

    def give(self, step: int, arrays: dict[str, np.ndarray], document: dict[str, Any]) -> None:
        """Publish a state for the regions that ask; a donor keeps its two newest ones.

        Raises:
          StoreUnavailable: try again later.
        """
        with self._busy:
            asking, context = self.asking(), self._context
            job = context.heartbeat.job
            numbers = f"{context.heartbeat.own.epoch}/{step}.{job.region}.{job.incarnation}"
            slot = f"state/{numbers}.{self._count}"
            self._count += 1
            record = write_state(context, slot, (step, arrays, document), asking, context.transport)
            travels_s = context.pace.transfer_s(sum(size for _, size in _pieces(record)))
            self._owe_nothing(asking, _FETCHED_AFTER_S + 4 * travels_s)
            self._given.append((slot, record))
            while len(self._given) > _KEPT:
                older, record = self._given[0]
                context.slots.remove(older)
                for digest, _ in _pieces(record):
                    self._drop(_piece(older, digest))
                self._given.popleft()

    def _owe_nothing(self, asking: Mapping[int, int], seconds: float) -> None:
        """Give these incarnations nothing for so long: they fetch what was given, or it failed."""
        until_s = self._context.heartbeat.clock_s + seconds
        self._served |= {x: max(until_s, self._served.get(x, 0.0)) for x in asking.items()}

    def sweep(self) -> None:
        """Remove the states of dead donors; called after an exchange."""
        living = self._context.heartbeat.living(certain=False)
        if self.asking() or self._context.heartbeat.own.wants:
            self._swept_for = None
        elif living != self._swept_for and self._busy.acquire(blocking=False):
            try:
                self._remove_left(living)
                self._swept_for = living
            except StoreUnavailable as error:
                log.info("old states are removed later: %s", error)
            finally:
                self._busy.release()

    def _remove_left(self, living: set[int]) -> None:
        store, region = self._context.store, self._context.region
        slots = {slot for slot, _ in self._given}
        blobs = {f"blob/{_piece(slot, x)}" for slot, one in self._given for x, _ in _pieces(one)}

        def left(donor: int) -> bool:
            return region == (donor if donor in living else min(living))

        for slot, (_, _, donor, *_) in self._context.slots.numbered("state/", 5).items():
            if slot not in slots and left(donor):
                self._context.slots.remove(slot)
        for key in store.list("blob/"):
            piece = _PIECE.fullmatch(key)
            if piece and key not in blobs and left(int(piece[1])):
                self._drop(key.removeprefix("blob/"))

    def owed(self) -> bool:
        """Whether this region is to give a state.

        True if others ask, and this is the lowest of the regions that do not ask and are not left
        behind. False while those that ask may still be fetching the state this region gave them.
        """
        asking, heartbeat = self.asking(), self._context.heartbeat
        if self._giving is not None and self._giving.is_alive():
            return False
        waiting = [one for one in asking.items() if heartbeat.clock_s >= self._served.get(one, 0.0)]
        if heartbeat.own.wants or not waiting:
            return False
        # Who was left behind has landed less than the others.
        others, wait_list = self.donors(), self._context.wait_list
        lower = [r for r in others if r < heartbeat.region and not wait_list.left_behind(r)]
        return heartbeat.own.awaited and not (others and wait_list.behind) and not lower

    def newest(self) -> State | None:
        """The state of the highest step that is complete and undamaged; None = there is none.

        While this region asks, only states given since then count: the payloads that follow an
        older one may be gone.

        Raises:
          StoreUnavailable: try again later.
          RuntimeError: this region has left the run (`check_open`).
        """
        check_open(self._context, "taking a state")
        own = self._context.heartbeat.own
        for slot, record in self._records().items():
            if own.wants and record.asked.get(self._context.region) != own.incarnation:
                continue
            try:
                return read_state(slot, record, self._context.transport)
            except (Rejected, Missing) as error:
                log.info("%s: %s", slot, error)
                self._context.counter.add("rejected_state")
        return None

    def _records(self) -> dict[str, StateRecord]:
        """The states of this epoch by their slots, the highest step first."""
        slots, epoch = self._context.slots, self._context.heartbeat.own.epoch
        newest_first = reversed(slots.numbered(f"state/{epoch}/", 4))
        return slots.all_first(dict.fromkeys(newest_first, StateRecord))

    def asking(self) -> dict[int, int]:
        """Incarnations of the other living regions that ask for a state."""
        latest = self._context.heartbeat.latest()
        others = self._context.heartbeat.living() - {self._context.region}
        return {r: latest[r].incarnation for r in sorted(others) if latest[r].wants}

    def donors(self) -> set[int]:
        """Other living regions that train, or have trained, with the others."""
        latest, others = self._context.heartbeat.latest(), self._context.heartbeat.living()
        others -= {self._context.region}
        return {r for r in others if latest[r].awaited and not latest[r].wants}

    def _drop(self, name: str) -> None:
        self._context.transport.drop(name, shared=True)

    # -- anchors, compared before a region starts from a state -------------------------------------

    def tell_anchors(self, versions: AnchorVersions) -> None:
        """Tell in our heartbeat which anchors we have had, while a region asks for a state.

        The newest ones, and those that newcomers name: a state may travel for long. So thousands
        are remembered, also where who asks counts as dead for a while (an outage). A version that
        we have passed and never had is told of without terms. What the device has still to compute
        is told by a later call.
        """
        heartbeat, told = self._context.heartbeat, {}
        named: set[str] = set()
        if asking := self.asking():
            new = [(name, one) for name, one in versions.items() if name not in self._had]
            new = itertools.takewhile(_computed, new)
            self._had |= {name: terms.as_record(one) for name, one in new}
            while len(self._had) > _REMEMBERED:
                del self._had[next(iter(self._had))]
            told = dict(itertools.islice(reversed(self._had.items()), _TOLD))
            latest = heartbeat.latest()
            named = {name for region in asking for name in latest[region].anchors} - told.keys()
            known = {x for x in named if x in self._had or _past(x, told)}
            told |= {name: self._had.get(name, {}) for name in known}
        if told != heartbeat.own.anchors:
            heartbeat.update(at_once=bool(named), anchors=told)

    def forget_anchors(self) -> None:
        """Tell of no anchor that we have had until now: the next state is another region's."""
        self._had = {}
        self._context.heartbeat.update(anchors={})

    def anchors_agree(self, step: int, version: str, own: Mapping[str, Any], at_last: bool) -> bool:
        """Compare this region's anchor with those of all regions that train, of the same version.

        Where one tells of newer versions alone, and may have had this one, our heartbeat names it:
        then it is told of in the answer (`tell_anchors`).

        Args:
          step, version: of the state.
          own: its terms.
          at_last: do not wait for regions that have told nothing yet; they have no vote.

        Returns:
          True: all regions that train have told of theirs, or `at_last`.

        Raises:
          Parted: anchors differ, and this region's is not the one that is kept (`heal`).
        """
        context = self._context
        context.heartbeat.check()
        donors, latest = sorted(self.donors()), context.heartbeat.latest()
        told = {region: latest[region].anchors for region in donors}
        known = {region: one[version] for region, one in told.items() if version in one}
        later = [one for r, one in told.items() if r not in known and _past(version, one)]
        # Who tells of a later one, and of all that it has had, never had this one.
        unclear = [one for one in later if len(one) >= _TOLD]
        if unclear and version not in context.heartbeat.own.anchors:
            self._had = {version: terms.as_record(own)}
            context.heartbeat.update(anchors=dict(self._had))
        missing = unclear or len(known) + len(later) < len(donors)
        voters = {region: one for region, one in known.items() if one}
        if (missing or not voters) and not at_last:
            return False
        label = f"a state of step {step}"
        if voters:
            terms.check(label, voters, context.region, terms.as_record(own), context.heal)
        else:
            log.warning("nobody has told of its anchor: %s is compared at the next send", label)
        return True


def _computed(one: tuple[str, Mapping[str, Any]]) -> bool:
    """Whether the terms of a version can be read without a wait for the device."""
    return all(x.is_ready() for x in one[1].values() if isinstance(x, jax.Array))


def _past(version: str, told: Iterable[str]) -> bool:
    """Whether more has landed in one of these versions."""
    return any(_landings(one) > _landings(version) for one in told)


def _landings(version: str) -> int:
    return sum(map(int, version.split(".")))


# -- the state that a run has ended with ----------------------------------------------------------


def leave_result(context: ExchangeContext, state: State) -> None:
    """Leave the state that the run has ended with in the store, unless another region has.

    Raises:
      StoreUnavailable: try again later.
    """
    epoch = context.heartbeat.own.epoch
    if result_of(context, epoch) is None:
        write_state(context, _result(epoch), state, {}, _in_store(context))


def result_of(context: ExchangeContext, epoch: int) -> StateRecord | None:
    """The record of an epoch's result; None = none was left.

    Raises:
      StoreUnavailable: try again later.
    """
    return context.slots.first(_result(epoch), StateRecord)


def take_result(context: ExchangeContext) -> State | None:
    """The result of our epoch; None = none was left.

    Raises:
      Rejected: a piece of it is damaged or gone.
      StoreUnavailable: try again later.
    """
    epoch = context.heartbeat.own.epoch
    record = result_of(context, epoch)
    try:
        return None if record is None else read_state(_result(epoch), record, _in_store(context))
    except Missing as error:
        raise Rejected(f"the run has ended, and a piece of its result is gone: {error}") from None


def _in_store(context: ExchangeContext) -> Transport:
    """Where the pieces of a result are: they outlive all jobs."""
    return StoreTransport(context.store, context.counter)


def _result(epoch: int) -> str:
    return f"result/{epoch}"
