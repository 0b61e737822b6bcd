"""The records that regions exchange through the store: all of them, with their fields and types.

docs/wire.md is the page about them: keys, signatures, who writes what when. A field with a default
may be left out; other fields than these are refused. `FORMAT` rises with every change of a record,
a key or a rule. A record of another format fails its signature, since the number is signed.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

import msgspec
from msgspec import Meta

FORMAT = 14

RUN = "run"
"""The key of a run's own record."""

ANY_FORMAT = 0
"""As which that is signed, so that jobs of other formats can read it."""

Whole = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""A whole number of 64 bits."""

Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""A whole number of 64 bits from 0: of bytes, of entries, of a region, of an incarnation."""

Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
"""SHA-256 in hex."""

Version = Annotated[str, Meta(pattern=r"^[0-9]{1,19}(\.[0-9]{1,19})*\Z")]
"""How often each fragment has landed, joined by dots (`anchor_history.anchor_version`)."""

Terms = dict[str, Whole | str]
"""What a region has decided (`terms`)."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record; its values are whole numbers, strings, flags, null, and lists and maps of such."""


class Run(Record):
    """What the jobs of a run have in common; signed as format 0.

    Attributes:
      format: `FORMAT`.
      run: the run's id.
      count: number of regions.
      transport: how payloads travel.
      heal: which anchor is kept where anchors differ.
      identity: what else the jobs have in common, for people to read: settings by their names.
    """

    format: Size
    run: str
    count: Size
    transport: str
    heal: str
    identity: dict[str, str]


class RunOfAnyFormat(msgspec.Struct, frozen=True):
    """The fields that `Run` keeps in every format."""

    format: Size
    run: str


class Beat(Record):
    """A region's record about itself; the only one that is overwritten.

    Attributes:
      incarnation: rises with every job that takes the region's place.
      counter: rises with every heartbeat.
      step: the step of its last send or landing; with learners the rounds that it has landed.
      trained: inner steps it has made; more than `step` where it could not reach the others.
      epoch: of the run that it takes part in; 0 while it joins.
      awaited: whether the others shall wait for its payloads.
      wants: whether it asks for a state.
      leaving: whether it has ended in good order.
      paused: whether it has saved its state, and waits for the others to do so.
      passed: the newest key of which it has all payloads, or "".
      address: where its payloads can be pulled from, or "".
      certificate: of its port, where it has made that itself (PEM), or "". It also shows it where
        it fetches.
      anchors: terms of anchors that it has had, by version, while another region asks for a state:
        of the newest ones, and of those that such a region names; without terms = never had. Of a
        region that asks: the version that it names (`StateTransfer.tell_anchors`).
    """

    incarnation: Size
    counter: Size = 0
    step: Size = 0
    trained: Size = 0
    epoch: Size = 0
    awaited: bool = False
    wants: bool = False
    leaving: bool = False
    paused: bool = False
    passed: str = ""
    address: str = ""
    certificate: str = ""
    anchors: dict[Version, Terms] = {}


class Epoch(Record):
    """Regions that begin together.

    Attributes:
      roster: their incarnations, by region.
    """

    roster: dict[Size, Size]


class Payload(Record):
    """A payload by its content.

    Attributes:
      digest: SHA-256 of its file.
      nbytes: size of the file.
      slices: of a payload that is reduced in slices: one for each region of the run, which reduces
        it. None for the sender's own slice, which no other region needs.
      early: a file that belongs to the payload, and may travel before it (`EarlyPayload`).
    """

    digest: Digest
    nbytes: Size
    slices: tuple[Payload | None, ...] = ()
    early: Payload | None = None

    @property
    def digests(self) -> list[str]:
        """Digests of all files: its own, those of the slices, and of what is early."""
        parts = [*self.slices, self.early]
        return [self.digest, *(one.digest for one in parts if one)]

    @property
    def content(self) -> str:
        """One digest of all files: of a single one its own, of several that of all `digests`."""
        found = self.digests
        return found[0] if len(found) == 1 else hashlib.sha256(" ".join(found).encode()).hexdigest()

    def nbytes_for(self, region: int) -> int:
        """Size of the file, of the slice that this region reduces, and of what is early."""
        own = self.slices[region] if self.slices else None
        return self.nbytes + sum(one.nbytes for one in (own, self.early) if one)


class Announcement(Record):
    """What a job has to say in an exchange.

    Attributes:
      payload: what it has published; None = it takes no part.
      terms: what it has decided.
    """

    payload: Payload | None
    terms: Terms = {}


class Confirmation(Record):
    """What a job holds once it has stopped waiting.

    Attributes:
      holds: `content` of the payloads that it has verified, by region.
    """

    holds: dict[Size, Digest]


class Admitted(Record):
    """Who takes part in an exchange.

    Attributes:
      incarnation: of the job that announced.
      payload: what it announced.
    """

    incarnation: Size
    payload: Payload


class Late(Record):
    """How late a region is that exchanges went on without.

    Attributes:
      step: later exchanges wait for it once it is past this step; -1 = from now on.
      missed: exchanges that have waited for it in vain since it last announced.
    """

    step: Whole
    missed: Size


class Commit(Record):
    """What regions agree on in an exchange: every one lands what this record names, and no more.

    Attributes:
      admitted: the jobs that take part, by region.
      terms: of the regions that announced, and were alive.
      writer: the region that wrote the record, and has all payloads.
      present: incarnations of those that take part, and of other living ones that announced.
      late: regions that have missed this exchange or an earlier one, and announced nothing since.
    """

    admitted: dict[Size, Admitted]
    terms: dict[Size, Terms]
    writer: Size
    present: dict[Size, Size] = {}
    late: dict[Size, Late] = {}

    def admits(self, region: int, incarnation: int) -> bool:
        """Whether this job takes part, and not another one in its region's place."""
        one = self.admitted.get(region)
        return one is not None and one.incarnation == incarnation

    def saw(self, region: int, incarnation: int) -> bool:
        """Whether this job was present, and not another one in its region's place."""
        return self.present.get(region) == incarnation


class Array(Record):
    """An array of a state, in pieces.

    Attributes:
      dtype: as safetensors calls it.
      shape: of the array.
      pieces: (SHA-256, bytes) of each piece of its bytes in C order.
    """

    dtype: str
    shape: tuple[Size, ...]
    pieces: tuple[tuple[Digest, Size], ...]


class State(Record):
    """What a region takes over that comes back.

    Attributes:
      position: steps made, or rounds landed.
      donor, incarnation: the job that gives it.
      asked: incarnations of the regions that had asked.
      arrays: by name.
      document: what else belongs to it, plain JSON.
    """

    position: Size
    donor: Size
    incarnation: Size
    asked: dict[Size, Size]
    arrays: dict[str, Array]
    document: dict[str, Any]


class Agreed(Record):
    """What was proposed first.

    Attributes:
      value: the proposal.
    """

    value: Terms
