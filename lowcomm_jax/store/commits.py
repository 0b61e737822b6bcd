"""`CommitLog`: announcements, confirmations, and the one record that says who took part.

Regions must agree on who took part. A late payload may be in time for one region and not for
another; their anchors would then differ from there on. So each exchange has one commit record. Any
region may write it; the first record is valid, and every region lands the payloads that it names.

All records of an exchange lie in one folder, `round/<epoch>/<name>/`. Those of one job carry its
number, so that no job writes over another one's. Readers know these numbers from heartbeats and
read the keys themselves, side by side: an object store charges a dozen times as much for a list.
"""

from __future__ import annotations

import itertools
import re
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lowcomm_jax.store.kv import Store
from lowcomm_jax.store.records import (
    Agreed,
    Announcement,
    Commit,
    Confirmation,
    Payload,
    Terms,
)
from lowcomm_jax.store.slots import Slots
from lowcomm_jax.store.wire import Job, Jobs

_ANNOUNCED = re.compile(r"round/(.+)/announce\.(\d{1,15})\.(\d{1,15})\.\d{1,15}")


class Announced(NamedTuple):
    """What a job has announced.

    Attributes:
      incarnation: of the job.
      payload: what it has published; None = it takes no part.
      terms: what it has decided (`store.terms`).
    """

    incarnation: int
    payload: Payload | None
    terms: Terms


def name_of(epoch: int, key: str, members: tuple[int, ...], count: int) -> str:
    """An exchange's name in the store: epoch, key, and the group where that is not everyone."""
    group = "" if len(members) == count else "@" + "-".join(map(str, members))
    return f"{epoch}/{urllib.parse.quote(key, safe='')}{group}"


class CommitLog:
    """Reads and writes the records of exchanges.

    Methods raise `StoreUnavailable`, and `Unreadable` where a signed record is none of its kind.
    """

    def __init__(self, store: Store, slots: Slots):
        self._store, self._slots = store, slots
        self._ahead: dict[str, tuple[Commit, dict[int, Announced]]] = {}

    def announce(self, name: str, job: Job, announcement: Announcement) -> Announced:
        """Write this job's announcement; returns the one that it has made first."""
        stands = self._slots.create(_own("announce", name, job), announcement)
        return Announced(job.incarnation, stands.payload, stands.terms)

    def announced(self, name: str, jobs: Jobs) -> dict[int, Announced]:
        """The announcements of the newest of these jobs that have announced, by region."""
        if (ahead := self._ahead.get(name)) is not None:
            return {region: one for region, one in ahead[1].items() if region in jobs}
        return self.all_announced([name], jobs)[name]

    def all_announced(self, names: Iterable[str], jobs: Jobs) -> dict[str, dict[int, Announced]]:
        """`announced` of several exchanges, read all at once."""
        every = [Job(region, i) for region, numbers in jobs.items() for i in numbers]
        slots = {(name, job): _own("announce", name, job) for name in names for job in every}
        stand = self._slots.all_first(dict.fromkeys(slots.values(), Announcement))
        found: dict[str, dict[int, Announced]] = {name: {} for name in names}
        for (name, job), slot in slots.items():
            if slot in stand and job.region not in found[name]:
                one = Announced(job.incarnation, stand[slot].payload, stand[slot].terms)
                found[name][job.region] = one
        return found

    def confirm(self, name: str, job: Job, holds: Mapping[int, str]) -> dict[int, str]:
        """Say which payloads this job holds and has verified; returns what it has said first.

        Args:
          holds: `Payload.content` by region.
        """
        return self._slots.create(_own("confirm", name, job), Confirmation(dict(holds))).holds

    def confirmed(self, name: str, jobs: Iterable[Job]) -> dict[int, dict[int, str]]:
        """The payloads that jobs have confirmed to hold, by region; of those that have, at once."""
        slots = {job.region: _own("confirm", name, job) for job in jobs}
        stand = self._slots.all_first(dict.fromkeys(slots.values(), Confirmation))
        return {region: stand[slot].holds for region, slot in slots.items() if slot in stand}

    def forget(self, name: str, job: Job) -> None:
        """Remove a job's keys of an exchange that has a commit record."""
        for kind in ("announce", "confirm"):
            self._slots.remove(_own(kind, name, job))

    def left(self, region: int | None = None) -> dict[tuple[str, Job], Announcement | None]:
        """What was announced and not removed, by exchange and job, read all at once.

        None = it is not signed as it should be.

        Args:
          region: whose jobs; None = all.
        """
        matches = [_ANNOUNCED.fullmatch(key) for key in self._store.list("round/")]
        made = {(m[1], Job(int(m[2]), int(m[3]))) for m in matches if m}
        slots = {x: _own("announce", *x) for x in sorted(made) if region in (None, x[1].region)}
        stand = self._slots.all_first(dict.fromkeys(slots.values(), Announcement))
        return {x: stand.get(slot) for x, slot in slots.items()}

    def committed(self, name: str) -> Commit | None:
        """The commit record; None = there is none."""
        ahead = self._ahead.get(name)
        return self._slots.first(_commit(name), Commit) if ahead is None else ahead[0]

    def read_ahead(self, names: Sequence[str], jobs: Jobs) -> dict[str, Commit]:
        """The records of the first of these exchanges, up to one that has none, read all at once.

        They are kept for `committed`, and what is announced there for `announced`: after a record
        no announcement says anything new.
        """
        found = self._slots.all_first({_commit(name): Commit for name in names})
        first = itertools.takewhile(lambda name: _commit(name) in found, names)
        landed = {name: found[_commit(name)] for name in first}
        said = self.all_announced(landed, jobs)
        self._ahead |= {name: (commit, said[name]) for name, commit in landed.items()}
        return landed

    def forget_ahead(self) -> None:
        """Let go of what `read_ahead` has read."""
        self._ahead = {}

    def commit(self, name: str, commit: Commit) -> Commit:
        """Write the commit record unless there is one; returns the one that is valid."""
        return self._slots.create(_commit(name), commit)

    def agree(self, name: str, proposal: dict[str, Any]) -> dict[str, Any]:
        """The value that was proposed first under this name."""
        return self._slots.create(f"agreed/{name}", Agreed(proposal)).value


def _commit(name: str) -> str:
    return f"round/{name}/commit"


def _own(kind: str, name: str, job: Job) -> str:
    return f"round/{name}/{kind}.{job.region}.{job.incarnation}"
