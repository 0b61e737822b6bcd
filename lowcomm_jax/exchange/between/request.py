"""What an exchange is about, and what it ends with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from lowcomm_jax.exchange.between import wire
from lowcomm_jax.exchange.between.commits import Commit
from lowcomm_jax.exchange.between.slices import Reduction


@dataclasses.dataclass(frozen=True)
class Request:
    """What one exchange is about.

    Attributes:
      key, name: as the caller calls it, and as the store does.
      members: regions of the group, ascending.
      arrays: of this region, without a region axis.
      takes_part: publish them, or announce absence.
      terms: what must be the same in all regions that take part (`terms`).
      joins: False = only read a commit that stands.
      reduction: how payloads are reduced in slices; None = everyone gets all of everything.
      like: what the payload of each region must hold; None = what this region's does, if it has
        one.
      follows: it continues another exchange, so that nobody has computed before it.
      patience_s: how much longer than usual others may compute.
    """

    key: str
    name: str
    members: tuple[int, ...]
    arrays: dict[str, Any] = dataclasses.field(default_factory=dict)
    takes_part: bool = False
    terms: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    joins: bool = True
    reduction: Reduction | None = None
    like: dict[int, wire.Shapes] | None = None
    follows: bool = False
    patience_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Gathered:
    """The end of an exchange.

    Attributes:
      commit: the record that says who took part.
      arrays: of those.
      heard: the regions that announced; vain: those that were waited for to the end, and did not.
      seconds: it took.
      reduced: `[parts, ...]`, what became of payloads that are reduced in slices; `arrays` are then
        what came beside them.
    """

    commit: Commit
    arrays: dict[int, dict[str, np.ndarray]]
    heard: frozenset[int]
    vain: frozenset[int]
    seconds: float
    reduced: dict[str, np.ndarray] | None = None


def problems(key: str, group: tuple[int, ...], region: int, count: int) -> list[str]:
    """What keeps this region of so many from exchanging this key in this group."""
    wrong = [] if key else ["the key is empty"]
    if len(set(group)) != len(group) or not set(group) <= set(range(count)):
        wrong.append(f"members {group} must be different regions of 0..{count - 1}")
    if region not in group:
        wrong.append(f"members {group} must contain this region, {region}")
    return wrong
