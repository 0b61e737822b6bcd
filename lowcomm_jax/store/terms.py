"""Terms of an exchange: values that must be the same in all regions that take part.

A region announces its decisions (which fragment leaves at which step, at which level) and the
digest of its anchor; the commit record has the terms of all. `check` raises `Parted` in a region
with other decisions or numbers; payloads of such a region do not count.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from lowcomm_jax.store.errors import Parted
from lowcomm_jax.store.records import Terms

Heal = Literal["stop", "majority", "lowest"]
log = logging.getLogger(__name__)


def as_record(terms: Mapping[str, Any]) -> Terms:
    """Terms as they are announced: whole numbers, and small unsigned arrays in hex.

    Blocks until arrays are computed.
    """
    return {name: x if isinstance(x, int) else _hex(x) for name, x in terms.items()}


def counting(terms: Mapping[int, Terms], heal: Heal) -> set[int]:
    """The regions whose terms hold; all regions where no terms hold, since all stop then."""
    holds = _holding(terms, heal)
    return {region for region, one in terms.items() if holds is None or _agree(one, holds)}


def check(what: str, terms: Mapping[int, Terms], region: int, own: Terms, heal: Heal) -> None:
    """Check that this region's terms are those that are kept.

    Args:
      what: the exchange, for the message.
      terms: by region, as a record has them.
      own: of this region, which may not be in the record.

    Raises:
      Parted: terms differ, and `heal` keeps others or none; lists all terms that differ.
    """
    # Where the record has terms of this region, too, they may be those of a job before it.
    known = {**terms, region: own}
    holds = _holding(terms, heal)
    if holds is not None and all(_agree(one, holds) for one in known.values()):
        return
    message = _message(what, known)
    if holds is None or heal == "stop" or not _agree(own, holds):
        raise Parted(message, heals=holds is not None and heal != "stop")
    log.warning("%s; this region goes on", message)


def _agree(one: Terms, other: Terms) -> bool:
    """Whether they are the same in all that both of them name."""
    return all(one[name] == other[name] for name in one.keys() & other.keys())


def _holding(terms: Mapping[int, Terms], heal: Heal) -> Terms | None:
    """The terms that hold, of those that name most; None = none do."""
    most = max(map(len, terms.values()))
    voters = {region: one for region, one in terms.items() if len(one) == most}
    if heal == "lowest":
        return voters[min(voters)]
    votes = {r: sum(one == other for other in voters.values()) for r, one in voters.items()}
    chosen = max(voters, key=votes.get)
    enough = len(voters) if heal == "stop" else len(voters) // 2 + 1
    return voters[chosen] if votes[chosen] >= enough else None


def _message(what: str, terms: Mapping[int, Terms]) -> str:
    """The message: the terms common to all, and those of each region that differ."""
    names = sorted({name for one in terms.values() for name in one})
    known = {name: {one[name] for one in terms.values() if name in one} for name in names}
    common = "".join(
        f", {name} {x}" for name in names if len(known[name]) == 1 for x in known[name]
    )
    apart = [name for name in names if len(known[name]) > 1]
    listed = "; ".join(
        f"region {region}: {', '.join(f'{n} {one[n]}' for n in apart if n in one)}"
        for region, one in sorted(terms.items())
    )
    return f"the regions have parted at {what}{common}: {listed}"


def _hex(x: Any) -> str:
    return "".join(f"{word:08x}" for word in np.asarray(x, np.uint32).reshape(-1))
