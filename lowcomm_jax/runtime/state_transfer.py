"""`StateTransfer`: gives a region that comes back the state of one that trained on.

A donor removes its older states. The states of a donor that died are removed by the job that takes
its place, or while there is none, by the lowest living region. Nobody removes them while a region
may fetch them.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lowcomm_jax.mesh.arrays import fetch, host_form, place_like
from lowcomm_jax.mesh.leader import leader
from lowcomm_jax.refused import Refused
from lowcomm_jax.runtime import records, wire
from lowcomm_jax.runtime.context import ExchangeContext
from lowcomm_jax.runtime.errors import Missing, Rejected, StoreUnavailable
from lowcomm_jax.state.leaves import flight_records, named_leaves, saved_name
from lowcomm_jax.state.train_state import TrainState

SHARED = ("anchor", "outer", "rate")
"""Fields of a `TrainState` that all regions have in common, besides the counters."""

CHUNK_BYTES = 64 << 20

_KEPT = 2

_FETCHED_AFTER_S = 30.0

_PIECE = re.compile(r"\d+\.\d+\.(\d+)\.[0-9a-f]{64}")
"""Name of a piece: epoch, step, donor, digest."""

log = logging.getLogger(__name__)

PyTree = Any
State = tuple[int, dict[str, np.ndarray], dict[str, Any]]
"""Step, arrays, document."""


def shared_state(state: TrainState) -> tuple[int, dict[str, np.ndarray], dict[str, Any]]:
    """The part of a state that a newcomer needs: (step, arrays by name, records of payloads).

    Only the first process of a job gets the arrays.
    """
    named: dict[str, Any] = {}
    for field in (*SHARED, "counters"):
        named |= named_leaves(saved_name(field), getattr(state, field))
    arrays = fetch(named, here=leader().leads)
    return int(state.counters.step), arrays, {"in_flight": flight_records(state)}


def placed_like(
    trees: Mapping[str, PyTree],
    arrays: Mapping[str, np.ndarray],
    whose: str,
    wrong: Sequence[str] = (),
) -> dict[str, PyTree]:
    """Another region's arrays, placed as this region's trees are; by the same prefixes.

    Args:
      trees: by the prefix of their leaves' names.
      whose: begins the error: "another region's".
      wrong: problems found so far, listed after those of the arrays.

    Raises:
      ValueError: the arrays are of another model or method; lists every difference.
    """
    likes = {prefix: named_leaves(prefix, tree) for prefix, tree in trees.items()}
    differ = [
        f"{name}: {arrays[name].shape if name in arrays else 'missing'} -> {x.shape}"
        for like in likes.values()
        for name, x in jax.tree.map(host_form, like).items()
        if name not in arrays or arrays[name].shape != x.shape
    ]
    if problems := [*differ, *wrong]:
        raise Refused(f"{whose} state does not fit", problems)

    def placed(prefix: str) -> PyTree:
        leaves = [place_like(arrays[name], x) for name, x in likes[prefix].items()]
        return jax.tree.unflatten(jax.tree.structure(trees[prefix]), leaves)

    return {prefix: placed(prefix) for prefix in trees}


def restored(name: str, data: bytes, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """An array of a state.

    Raises:
      Rejected: the bytes are not those of such an array.
    """
    try:
        return wire.restore(data, dtype, shape)
    except (ValueError, TypeError) as error:
        raise Rejected(f"array {name} of a state: {error}") from None


def document(value: Any) -> dict:
    """What is in flight, in a record of a state; raises `Rejected`."""
    flight = {"key": records.text, "fragment": records.whole, "moved": records.flag}
    in_flight = records.section(value).get("in_flight", [])
    records.listed(lambda x: records.picked(x, **flight))(in_flight)
    return value


def _given(value: Any) -> dict:
    piece = records.row(records.text, records.text, records.size)
    return records.fields(
        value,
        step=records.whole,
        donor=records.whole,
        asked=records.by_region(records.whole),
        arrays=records.arrays(piece),
        document=document,
    )


class StateTransfer:
    """Gives and takes states: one create-only record a step, arrays in pieces named by content."""

    def __init__(self, context: ExchangeContext):
        self._context, self._chunk_bytes = context, CHUNK_BYTES
        # When each incarnation of a region was given so many bytes.
        self._served: dict[tuple[int, int], tuple[float, int]] = {}
        self._given: deque[tuple[str, list[str]]] = deque()
        self._giving: threading.Thread | None = None
        self._busy = threading.Lock()  # with giving, or with removing
        self._swept_for: set[int] | None = None  # who lived when nothing of the dead was left

    def give_soon(self, step: int, arrays: dict[str, np.ndarray], document: dict[str, Any]) -> None:
        """Call `give` on a thread of its own, so that training goes on meanwhile."""

        def act() -> None:
            try:
                self.give(step, arrays, document)
            except StoreUnavailable as error:
                log.warning("no state was given, it is tried again: %s", error)

        run_guarded = self._context.heartbeat.run_guarded
        self._giving = threading.Thread(target=run_guarded, args=(act,), name="lowcomm-give")
        self._giving.daemon = True
        self._giving.start()

    def join(self) -> None:
        """Wait for the state that is being given, if any."""
        if self._giving is not None:
            self._giving.join()

    def give(self, step: int, arrays: dict[str, np.ndarray], document: dict[str, Any]) -> bool:
        """Publish a state for the regions that ask; a donor keeps its two newest ones.

        Returns:
          False: all regions that ask were given this step's state already.

        Raises:
          StoreUnavailable: try again later.
        """
        with self._busy:
            return self._publish(step, arrays, document)

    def _publish(self, step: int, arrays: dict[str, np.ndarray], document: dict[str, Any]) -> bool:
        """Write a state for the regions that ask for one; False if all have one by now."""
        asking = self.asking()
        key = self._free(step, asking)
        if key is None:
            return False
        pieces = {name: self._put(step, np.asarray(x)) for name, x in arrays.items()}
        body = {
            "step": step,
            "donor": self._context.region,
            "asked": {str(region): incarnation for region, incarnation in asking.items()},
            "arrays": {
                name: [*wire.shapes_of({name: arrays[name]})[name], pieces[name]] for name in arrays
            },
            "document": document,
        }
        names = [name for listed in pieces.values() for name, _, _ in listed]
        record = self._context.seal.close(key, body)
        # An answer that was lost on its way: it stands there, and it is ours.
        if not self._context.store.create(key, record) and self._context.store.read(key) != record:
            # Pieces carry the donor in their names: these are ours alone.
            self._drop(names)
            return False
        nbytes = sum(size for listed in pieces.values() for _, _, size in listed)
        self._served |= dict.fromkeys(asking.items(), (self._context.heartbeat.clock_s, nbytes))
        self._given.append((key, names))
        while len(self._given) > _KEPT:
            older, names = self._given[0]
            self._context.store.delete(older)
            self._drop(names)
            self._given.popleft()
        return True

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
        ours = {x for key, names in self._given for x in (key, *names)}

        def left(name: str, donor: int) -> bool:
            return name not in ours and region == (donor if donor in living else min(living))

        for key in store.list("state/"):
            try:
                donor = self._context.seal.open(key, store.read(key) or b"", _given)["donor"]
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
        asking, heartbeat = self.asking(), self._context.heartbeat
        if self._giving is not None and self._giving.is_alive():
            return False
        if heartbeat.own.wants or all(map(self._lately, asking.items())):
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
        """
        for key in reversed(self._context.store.list(self._prefix)):
            data = self._context.store.read(key)
            if data is None:
                continue
            try:
                body = self._context.seal.open(key, data, _given)
                if self._is_for_us(body):
                    return self._take(body)
            except (Rejected, Missing):
                self._context.counter.add("rejected_state")
        return None

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

    def _free(self, step: int, asking: dict[int, int]) -> str | None:
        """A key for a state of this step; None = all regions that ask have one."""
        store, start = self._context.store, f"{self._prefix}{step:012d}."
        stand = store.list(start)
        for key in stand:
            try:
                asked = self._context.seal.open(key, store.read(key) or b"", _given)["asked"]
            except Rejected:
                self._context.counter.add("rejected_state")
                continue
            if all(asked.get(region) == n for region, n in asking.items()):
                return None
        number = int(stand[-1].removeprefix(start)) + 1 if stand else 0
        return f"{start}{number:06d}"

    def _lately(self, one: tuple[int, int]) -> bool:
        """Whether this incarnation of a region was given a state, and may still be fetching it."""
        if one not in self._served:
            return False
        given_s, nbytes = self._served[one]
        allowed_s = _FETCHED_AFTER_S + 4 * self._context.pace.transfer_s(nbytes)
        return self._context.heartbeat.clock_s - given_s < allowed_s

    def _is_for_us(self, body: dict) -> bool:
        own = self._context.heartbeat.own
        return not own.wants or body["asked"].get(self._context.region) == own.incarnation

    @property
    def _prefix(self) -> str:
        """Of the states of this epoch: an older state belongs to another past."""
        return f"state/{self._context.heartbeat.own.epoch}/"

    def _put(self, step: int, array: np.ndarray) -> list[list]:
        """Publish an array; [name, SHA-256, bytes] of each piece."""
        data = wire.raw(array).tobytes()
        listed = []
        for start in range(0, len(data), self._chunk_bytes):
            piece = data[start : start + self._chunk_bytes]
            digest = wire.digest(piece)
            name = f"{self._context.heartbeat.own.epoch}.{step}.{self._context.region}.{digest}"
            self._context.transport.put(name, piece)
            listed.append([name, digest, len(piece)])
        return listed

    def _drop(self, names: list[str]) -> None:
        for name in names:
            self._context.transport.drop(name, shared=True)

    def _take(self, body: dict[str, Any]) -> State:
        arrays = {}
        for name, (dtype, shape, listed) in body["arrays"].items():
            data = b"".join(self._get(body["donor"], *piece) for piece in listed)
            arrays[name] = restored(name, data, dtype, shape)
        return body["step"], arrays, body["document"]

    def _get(self, donor: int, name: str, digest: str, nbytes: int) -> bytes:
        data = self._context.transport.get(name, nbytes, [donor])
        if wire.digest(data) != digest:
            raise Rejected(f"piece {name} of a state was damaged")
        return data
