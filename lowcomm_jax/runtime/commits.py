"""`CommitLog`: announcements, confirmations, and the one record that says who took part.

Regions must agree on who took part. A late payload may be in time for one region and not for
another; their anchors would then differ from there on. So each exchange has one commit record. Any
region may write it; the first record is valid, and every region lands the payloads that it names.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from lowcomm_jax.runtime import records
from lowcomm_jax.runtime.errors import Rejected
from lowcomm_jax.runtime.kv import Store, segment
from lowcomm_jax.runtime.secret import Seal
from lowcomm_jax.runtime.terms import Terms

T = TypeVar("T")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True)
class PayloadRecord:
    """A payload by its content.

    Attributes:
      digest: SHA-256 in hex.
      nbytes: its size.
      slices: of a payload that is reduced in slices: one for each region of the run, which reduces
        it. None for the sender's own slice, which no other region needs.
      early: bytes that belong to the payload, and may travel before it (`EarlyPayload`); None =
        there are none, and no field stands for them in the store.
    """

    digest: str
    nbytes: int
    slices: tuple[PayloadRecord | None, ...] = ()
    early: PayloadRecord | None = None

    @classmethod
    def read(cls, body: Any) -> PayloadRecord:
        """From the JSON of a record; raises `Rejected`."""
        found = records.fields(
            {"early": None, **records.section(body)},
            digest=_digest,
            nbytes=records.size,
            slices=records.listed(records.or_none(cls.read)),
            early=records.or_none(cls.read),
        )
        return cls(found["digest"], found["nbytes"], tuple(found["slices"]), found["early"])

    @property
    def digests(self) -> list[str]:
        """Digests of the bytes, of all slices, and of what is sent early."""
        parts = [*self.slices, self.early]
        return [self.digest, *(one.digest for one in parts if one)]

    def nbytes_for(self, region: int) -> int:
        """Size of the bytes, of the slice that this region reduces, and of what is sent early."""
        own = self.slices[region] if self.slices else None
        return self.nbytes + sum(one.nbytes for one in (own, self.early) if one)

    @property
    def content(self) -> str:
        """One digest of all bytes."""
        found = self.digests
        return found[0] if len(found) == 1 else hashlib.sha256(" ".join(found).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Announcement:
    """A region's announcement in one exchange.

    Attributes:
      region, incarnation: who announces.
      payload: what it has published; None = it takes no part.
      terms: what it has decided (`runtime.terms`).
    """

    region: int
    incarnation: int
    payload: PayloadRecord | None
    terms: Terms

    @classmethod
    def read(cls, body: Any) -> Announcement:
        """From the JSON of a record; raises `Rejected`."""
        reads = {"region": records.whole, "incarnation": records.whole, "terms": records.terms}
        reads |= {"payload": records.or_none(PayloadRecord.read)}
        return cls(**records.fields(body, **reads))


class Late(NamedTuple):
    """How late a region is that exchanges went on without.

    Attributes:
      step: later exchanges wait for it once it is past this step.
      missed: exchanges that have waited for it in vain since it last announced.
    """

    step: int
    missed: int


@dataclasses.dataclass(frozen=True)
class Commit:
    """The commit record of one exchange.

    Attributes:
      payloads: of the regions that took part.
      terms: of the regions that announced, and were alive.
      writer: the region that wrote the record, and has all payloads.
      present: the regions that took part, and other living ones that announced; ascending.
      late: regions that have missed this exchange or an earlier one, and announced nothing since.
    """

    payloads: dict[int, PayloadRecord]
    terms: dict[int, Terms]
    writer: int
    present: tuple[int, ...] = ()
    late: dict[int, Late] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, body: Any) -> Commit:
        """From the JSON of a record; raises `Rejected`."""
        found = records.fields(
            body,
            payloads=records.by_region(PayloadRecord.read),
            terms=records.by_region(records.terms),
            writer=records.whole,
            present=records.listed(records.whole),
            late=records.by_region(records.row(records.whole, records.size)),
        )
        late = {region: Late(*one) for region, one in found["late"].items()}
        return cls(**{**found, "present": tuple(found["present"]), "late": late})


def _digest(value: Any) -> str:
    if not _SHA256.fullmatch(records.text(value)):
        raise Rejected("no digest")
    return value


def name_of(epoch: int, key: str, members: tuple[int, ...], count: int) -> str:
    """An exchange's name in the store: epoch, key, and the group where that is not everyone."""
    group = "" if len(members) == count else "@" + "-".join(map(str, members))
    return f"{epoch}.{segment(key)}{group}"


class CommitLog:
    """Reads and writes announcements and commit records.

    Records that are not signed as they should be are counted ("rejected_record") and ignored.
    """

    def __init__(self, store: Store, seal: Seal):
        self._store, self._seal = store, seal

    def announce(self, name: str, announcement: Announcement) -> None:
        """Write this region's announcement, over that of an earlier job in its place."""
        key = announcement_key(name, announcement.region)
        record = self._seal.close(key, as_body(announcement))
        if not self._store.create(key, record):
            self._store.write(key, record)

    def announcement(self, name: str, region: int) -> Announcement | None:
        """A region's announcement; None = there is none."""
        key = announcement_key(name, region)
        found = self._open(key, self._store.read(key), Announcement.read)
        return found if found is not None and found.region == region else None

    def sit_out(self, names: Sequence[str], region: int, incarnation: int) -> None:
        """Announce in all of these exchanges at once that this region takes no part in them.

        An announcement that it has made stands. No terms: the region may agree with everyone.
        """
        absent = as_body(Announcement(region, incarnation, None, {}))
        keys = [announcement_key(name, region) for name in names]
        self._store.create_all({key: self._seal.close(key, absent) for key in keys})

    def announcements(
        self, names: Sequence[str], members: Sequence[int]
    ) -> dict[str, dict[int, Announcement]]:
        """Those that have announced, by exchange and region, read all at once."""
        keys = {(n, r): announcement_key(n, r) for n in names for r in members}
        values = self._store.read_all(list(keys.values()))
        found: dict[str, dict[int, Announcement]] = {name: {} for name in names}
        for (name, region), key in keys.items():
            one = self._open(key, values[key], Announcement.read)
            if one is not None and one.region == region:
                found[name][region] = one
        return found

    def confirm(self, name: str, region: int, held: dict[int, str]) -> None:
        """Say which payloads a region holds and has verified: `PayloadRecord.content` by region."""
        key = f"held/{name}/{region}"
        body = {str(r): digest for r, digest in held.items()}
        self._store.write(key, self._seal.close(key, body))

    def confirmed(self, name: str, region: int) -> dict[int, str] | None:
        """The payloads that a region has confirmed to hold; None = it has confirmed nothing yet."""
        key = f"held/{name}/{region}"
        return self._open(key, self._store.read(key), records.by_region(records.text))

    def forget(self, name: str, region: int) -> None:
        """Remove a region's keys of an exchange that has a commit record."""
        self._store.delete(announcement_key(name, region))
        self._store.delete(f"held/{name}/{region}")

    def all_announcements(self) -> list[tuple[str, int]]:
        """Names and regions of all announcements that were not removed."""
        found = [re.fullmatch(r"said/(.+)/(\d+)", key) for key in self._store.list("said/")]
        return [(match[1], int(match[2])) for match in found if match]

    def committed(self, name: str) -> Commit | None:
        """The commit record; None = there is none."""
        return self._committed(name)[0]

    def read_ahead(self, names: Sequence[str], members: Sequence[int]) -> dict[str, Commit]:
        """Read the records of exchanges all at once, for later; the first ones that have one.

        Announcements, too, whose job it no longer is to be new where there is a record.
        """
        keys = {name: f"commit/{name}/0" for name in names}
        found = self._store.read_ahead(list(keys.values()))
        landed: dict[str, Commit] = {}
        for name, key in keys.items():
            commit = self.committed(name) if key in found else None
            if commit is None:
                break
            landed[name] = commit
        said = [announcement_key(name, region) for name in landed for region in members]
        self._store.read_ahead(said, absent=True)
        return landed

    def commit(self, name: str, commit: Commit) -> Commit:
        """Write the commit record unless there is one; returns the one that is valid."""
        while True:
            found, key = self._committed(name)
            if found is not None:
                return found
            self._store.create(key, self._seal.close(key, as_body(commit)))

    def commit_all(self, commits: dict[str, Commit]) -> None:
        """Write the records of several exchanges at once, where there are none."""
        keys = {f"commit/{name}/0": commit for name, commit in commits.items()}
        closed = {key: self._seal.close(key, as_body(x)) for key, x in keys.items()}
        self._store.create_all(closed)

    def agree(self, name: str, proposal: dict) -> dict:
        """The value that was proposed first under this name."""
        for number in itertools.count():
            key = f"agreed/{name}/{number}"
            self._store.create(key, self._seal.close(key, proposal))
            # A record that is not signed as it should be: the next number takes its place.
            body = self._open(key, self._store.read(key), _like(proposal))
            if body is not None:
                return body
        raise AssertionError("numbers never end")

    def _committed(self, name: str) -> tuple[Commit | None, str]:
        """(the commit record, or None and the key it can be created under).

        All regions ignore a record that is not signed, and use the next number: such a record can
        neither replace a commit nor keep regions from making one.
        """
        for number in itertools.count():
            key = f"commit/{name}/{number}"
            data = self._store.read(key)
            if data is None:
                return None, key
            found = self._open(key, data, Commit.read)
            if found is not None:
                return found, key
        raise AssertionError("numbers never end")

    def _open(self, key: str, data: bytes | None, read: records.Read[T]) -> T | None:
        if data is None:
            return None
        try:
            return self._seal.open(key, data, read)
        except Rejected:
            self._store.counter.add("rejected_record")
            return None


def as_body(record: Announcement | Commit) -> dict[str, Any]:
    """A record as JSON; `early` stands in it where there is something early."""
    early = ("early", None)
    return dataclasses.asdict(record, dict_factory=lambda x: dict(one for one in x if one != early))


def _like(proposal: dict) -> records.Read[dict]:
    """A reader of proposals of the same fields, each of the same kind."""

    def read(body: Any) -> dict:
        found = records.section(body)
        if {k: type(x) for k, x in found.items()} != {k: type(x) for k, x in proposal.items()}:
            raise Rejected("another kind of proposal")
        return found

    return read


def announcement_key(name: str, region: int) -> str:
    """The key under which a region announces."""
    return f"said/{name}/{region}"
