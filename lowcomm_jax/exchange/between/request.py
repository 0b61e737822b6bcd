"""What an exchange is about, and what it ends with."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from lowcomm_jax.exchange.between.commits import Commit


@dataclasses.dataclass(frozen=True)
class Request:
    """What one exchange is about.

    Attributes:
      key, name: as the caller calls it, and as the store does.
      members: regions of the group, ascending.
      arrays: of this region, without a region axis.
      takes_part: publish them, or announce absence.
      note: small JSON for the others.
      joins: False = only read a commit that stands.
    """

    key: str
    name: str
    members: tuple[int, ...]
    arrays: dict[str, Any] = dataclasses.field(default_factory=dict)
    takes_part: bool = False
    note: dict | None = None
    joins: bool = True


@dataclasses.dataclass(frozen=True)
class Gathered:
    """The end of an exchange: the commit record, and the arrays of those who took part."""

    commit: Commit
    arrays: dict[int, dict[str, np.ndarray]]
    heard: frozenset[int]
    seconds: float
