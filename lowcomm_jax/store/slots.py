"""`Slots`: signed records in the store, created once and never changed.

A slot is a key without its last part, a number from 0. Its record is that of the lowest number
whose signature holds. So a false record takes a number and not the slot, and all readers find the
same record: numbers are created in order, and nothing but a record's bytes is looked at.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from lowcomm_jax.store.errors import Rejected, StoreUnavailable
from lowcomm_jax.store.kv import Store
from lowcomm_jax.store.records import FORMAT
from lowcomm_jax.store.secret import Seal

T = TypeVar("T", bound=msgspec.Struct)


def key_of(slot: str, number: int = 0) -> str:
    """The key of a slot's record with this number."""
    return f"{slot}.{number}"


class Slots:
    """The slots of one run.

    Attributes:
      seal: signs and checks records.

    Methods raise `StoreUnavailable`, and `Unreadable` where a signed record is not of its kind.
    Records that are not signed as they should be are counted ("rejected_record") and passed over.
    """

    def __init__(self, store: Store, seal: Seal):
        self._store, self.seal = store, seal
        self._taken: dict[str, set[int]] = {}  # by slot: numbers above 0 that have been seen there

    def first(self, slot: str, kind: type[T], above: int = -1) -> T | None:
        """The record of a slot, of a number above this one; None = there is none."""
        for number in itertools.count(above + 1):
            data = self._store.read(key := key_of(slot, number))
            if data is None:
                return None
            self._note(slot, number)
            if (found := self.opened(key, data, kind)) is not None:
                return found
        raise AssertionError("numbers never end")

    def all_first(self, slots: Mapping[str, type[T]]) -> dict[str, T]:
        """The records of those slots that have one, by their kinds; read all at once."""
        data = self._store.read_all([key_of(slot) for slot in slots])
        written = [slot for slot in slots if data[key_of(slot)] is not None]
        found = {slot: self.opened(k := key_of(slot), data[k], slots[slot]) for slot in written}
        found |= {slot: self.first(slot, slots[slot], 0) for slot, x in found.items() if x is None}
        return {slot: x for slot, x in found.items() if x is not None}

    def create(self, slot: str, record: T) -> T:
        """Write the record of a slot unless there is one; returns the one that stands there."""
        for number in itertools.count():
            key = key_of(slot, number)
            self._note(slot, number)
            if self._store.create(key, self.seal.close(key, record)):
                return record
            data = self._store.read(key)
            if data is None:
                raise StoreUnavailable(f"{key} was there and could not be read")
            if (stands := self.opened(key, data, type(record))) is not None:
                return stands
        raise AssertionError("numbers never end")

    def numbered(self, prefix: str, count: int) -> dict[str, tuple[int, ...]]:
        """The slots under a prefix, in the order of the `count` numbers that end their names.

        Other keys are counted ("unknown_key"): other programs that write to the folder, such as a
        sync tool, may leave such files there.
        """
        found, known = {}, re.compile(rf"[0-9]{{1,15}}(?:[./][0-9]{{1,15}}){{{count}}}")
        for key in self._store.list(prefix):
            if known.fullmatch(key.removeprefix(prefix)):
                slot, _, last = key.rpartition(".")
                self._note(slot, int(last))
                found[slot] = tuple(map(int, re.split("[./]", slot.removeprefix(prefix))))
            else:
                self._store.counter.add("unknown_key")
        return dict(sorted(found.items(), key=lambda one: one[1]))

    def remove(self, slot: str) -> None:
        """Remove a slot's record, with the false ones that have been seen beside it.

        The lowest goes last: where this fails half-way, a reader still finds what is left.
        """
        for number in sorted({0, *self._taken.get(slot, ())}, reverse=True):
            self._store.delete(key_of(slot, number))
        self._taken.pop(slot, None)

    def _note(self, slot: str, number: int) -> None:
        if number:
            self._taken.setdefault(slot, set()).add(number)

    def write(self, key: str, record: msgspec.Struct) -> None:
        """Overwrite the record of a key that is no slot: a heartbeat."""
        self._store.write(key, self.seal.close(key, record))

    def opened(self, key: str, data: bytes, kind: type[T], format: int = FORMAT) -> T | None:
        """The record that was read under a key; None = it is not signed as it should be."""
        try:
            return self.seal.open(key, data, kind, format)
        except Rejected:
            self._store.counter.add("rejected_record")
            return None
