"""States that a region which comes back can start from, given by regions that trained on.

A donor removes its older ones. What it leaves when it dies the job that takes its place removes,
or, while there is none, the lowest living region; never while anybody may be fetching it.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import deque
from typing import Any

import numpy as np

from lowcomm_jax.runtime import wire
from lowcomm_jax.runtime.context import ExchangeContext
from lowcomm_jax.runtime.errors import Missing, Rejected, StoreUnavailable
from lowcomm_jax.runtime.heartbeat import Waiting

CHUNK_BYTES = 64 << 20
_KEPT = 2
_FETCHED_AFTER_S = 30.0
_PIECE = re.compile(r"\d+\.\d+\.(\d+)\.[0-9a-f]{64}")
"""Name of a piece: epoch, step, donor, digest."""
log = logging.getLogger(__name__)

State = tuple[int, dict[str, np.ndarray], dict]
"""Step, arrays, document."""


class StateTransfer:
    """Gives and takes states: one create-only record a step, arrays in pieces named by content."""

    def __init__(self, office: ExchangeContext, waiting: Waiting, chunk_bytes: int = CHUNK_BYTES):
        self._office, self._waiting, self._chunk_bytes = office, waiting, chunk_bytes
        # When each incarnation of a region was given so many bytes.
        self._served: dict[tuple[int, int], tuple[float, int]] = {}
        self._given: deque[tuple[str, list[str]]] = deque()
        self._giving: threading.Thread | None = None
        self._busy = threading.Lock()  # with giving, or with removing
        self._tidy_for: set[int] | None = None  # who lived when nothing of the dead was left

    def give_soon(self, step: int, arrays: dict[str, np.ndarray], document: dict) -> None:
        """`give` on a thread of its own, so that training goes on meanwhile."""

        def act() -> None:
            try:
                self.give(step, arrays, document)
            except StoreUnavailable as error:
                log.warning("no state was given, it is tried again: %s", error)

        guard = self._office.beats.guard
        self._giving = threading.Thread(target=guard, args=(act,), name="lowcomm-give")
        self._giving.daemon = True
        self._giving.start()

    def join(self) -> None:
        """Wait for the state that is being given, if any."""
        if self._giving is not None:
            self._giving.join()

    def give(self, step: int, arrays: dict[str, np.ndarray], document: dict) -> bool:
        """Publish a state for the regions that ask; the two newest ones of a donor are kept.

        Returns:
          False: this step's has been given already to all who ask.

        Raises:
          StoreUnavailable: try again later.
        """
        with self._busy:
            return self._publish(step, arrays, document)

    def _publish(self, step: int, arrays: dict[str, np.ndarray], document: dict) -> bool:
        asking = self.asking()
        key = self._free(step, asking)
        if key is None:
            return False
        pieces = {name: self._put(step, np.asarray(x)) for name, x in arrays.items()}
        body = {
            "step": step,
            "donor": self._office.region,
            "asked": {str(region): incarnation for region, incarnation in asking.items()},
            "arrays": {
                name: [*wire.shapes_of({name: arrays[name]})[name], pieces[name]] for name in arrays
            },
            "document": document,
        }
        names = [name for listed in pieces.values() for name, _, _ in listed]
        if not self._office.store.create(key, self._office.seal.close(key, body)):
            # Pieces carry the donor in their names: these are ours alone.
            self._drop(names)
            return False
        nbytes = sum(size for listed in pieces.values() for _, _, size in listed)
        self._served |= dict.fromkeys(asking.items(), (self._office.beats.clock_s, nbytes))
        self._given.append((key, names))
        while len(self._given) > _KEPT:
            older, names = self._given[0]
            self._office.store.delete(older)
            self._drop(names)
            self._given.popleft()
        return True

    def sweep(self) -> None:
        """Remove what donors have left that are gone; called now and then."""
        living = self._office.beats.living(certain=False)
        if self.asking() or self._office.beats.own.wants:
            self._tidy_for = None
        elif living != self._tidy_for and self._busy.acquire(blocking=False):
            try:
                self._remove_left(living)
                self._tidy_for = living
            except StoreUnavailable as error:
                log.info("what is left of states is removed later: %s", error)
            finally:
                self._busy.release()

    def _remove_left(self, living: set[int]) -> None:
        store, region = self._office.store, self._office.region
        ours = {x for key, names in self._given for x in (key, *names)}

        def left(name: str, donor: int) -> bool:
            return name not in ours and region == (donor if donor in living else min(living))

        for key in store.list("state/"):
            try:
                donor = self._office.seal.open(key, store.read(key) or b"")["donor"]
            except Rejected:
                continue  # of a stranger, or removed meanwhile
            if left(key, donor):
                store.delete(key)
        for key in store.list("blob/"):
            name = key.removeprefix("blob/")
            piece = _PIECE.fullmatch(name)
            if piece and left(name, int(piece[1])):
                self._drop([name])

    def owed(self) -> bool:
        """See `RemoteExchange.owes_state`."""
        asking, beats = self.asking(), self._office.beats
        if self._giving is not None and self._giving.is_alive():
            return False
        if beats.own.wants or all(map(self._lately, asking.items())):
            return False
        # Who was left behind has landed less than the others.
        behind = self._waiting.left_behind
        others = self.donors()
        lower = [r for r in others if r < beats.region and not behind(r)]
        return beats.own.awaited and not (others and self._waiting.behind) and not lower

    def newest(self) -> State | None:
        """The state of the highest step that can be had whole and undamaged, if any.

        While this region asks, only those count that were given since: the payloads that follow
        an older one may be gone.

        Raises:
          StoreUnavailable: try again later.
        """
        for key in reversed(self._office.store.list(self._prefix)):
            data = self._office.store.read(key)
            if data is None:
                continue
            try:
                body = self._office.seal.open(key, data)
                if self._is_for_us(body):
                    return self._take(body)
            except (Rejected, Missing):
                self._office.tally.add("rejected_state")
        return None

    def asking(self) -> dict[int, int]:
        """Incarnations of the other living regions that ask for a state."""
        latest = self._office.beats.latest()
        others = self._office.beats.living() - {self._office.region}
        return {r: latest[r].incarnation for r in sorted(others) if latest[r].wants}

    def donors(self) -> set[int]:
        """Other living regions that train, or have trained, with the others."""
        latest, others = self._office.beats.latest(), self._office.beats.living()
        others -= {self._office.region}
        return {r for r in others if latest[r].awaited and not latest[r].wants}

    def _free(self, step: int, asking: dict[int, int]) -> str | None:
        """A key for a state of this step; None = one stands that is for all who ask."""
        store, start = self._office.store, f"{self._prefix}{step:012d}."
        stand = store.list(start)
        for key in stand:
            try:
                asked = self._office.seal.open(key, store.read(key) or b"")["asked"]
            except Rejected:
                self._office.tally.add("rejected_state")
                continue
            if all(asked.get(str(region)) == n for region, n in asking.items()):
                return None
        number = int(stand[-1].removeprefix(start)) + 1 if stand else 0
        return f"{start}{number:06d}"

    def _lately(self, one: tuple[int, int]) -> bool:
        """Whether this incarnation of a region was given a state that it may still be fetching."""
        if one not in self._served:
            return False
        given_s, nbytes = self._served[one]
        allowed_s = _FETCHED_AFTER_S + 4 * self._office.pace.transfer_s(nbytes)
        return self._office.beats.clock_s - given_s < allowed_s

    def _is_for_us(self, body: dict) -> bool:
        own = self._office.beats.own
        return not own.wants or body["asked"].get(str(self._office.region)) == own.incarnation

    @property
    def _prefix(self) -> str:
        """Of the states of this epoch: what was given before it is of another past."""
        return f"state/{self._office.beats.own.epoch}/"

    def _put(self, step: int, array: np.ndarray) -> list[list]:
        """Publish an array; [name, SHA-256, bytes] of each piece."""
        data = wire.raw(array).tobytes()
        listed = []
        for start in range(0, len(data), self._chunk_bytes):
            piece = data[start : start + self._chunk_bytes]
            digest = wire.digest(piece)
            name = f"{self._office.beats.own.epoch}.{step}.{self._office.region}.{digest}"
            self._office.transport.put(name, piece)
            listed.append([name, digest, len(piece)])
        return listed

    def _drop(self, names: list[str]) -> None:
        for name in names:
            self._office.transport.drop(name, shared=True)

    def _take(self, body: dict[str, Any]) -> State:
        arrays = {}
        for name, (dtype, shape, listed) in body["arrays"].items():
            data = b"".join(self._get(body["donor"], *piece) for piece in listed)
            arrays[name] = wire.restore(data, dtype, tuple(shape))
        return body["step"], arrays, body["document"]

    def _get(self, donor: int, name: str, digest: str, nbytes: int) -> bytes:
        data = self._office.transport.get(name, nbytes, [donor], {})
        if wire.digest(data) != digest:
            raise Rejected(f"piece {name} of a state was damaged")
        return data
