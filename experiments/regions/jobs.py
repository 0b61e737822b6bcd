"""Regions as separate jobs: the config's fields of their exchange."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lowcomm_jax.methods import Method

EXCHANGES = "store", "peers"
"""How payloads travel between separate jobs: the transports, by their names in a config."""

PEERS = {"address": "127.0.0.1:0", "listen": None, "certificates": None}
"""Fields that only `exchange=peers` reads, with their defaults."""


def is_separate_job(fields: Mapping[str, Any]) -> bool:
    """Whether this job trains one region, and other jobs the others."""
    return fields["exchange"] in EXCHANGES


@dataclasses.dataclass(frozen=True)
class Described:
    """What refusals read of an exchange that is not open yet (`setup.BetweenJobs`)."""

    lingers: bool
    region: int
    count: int
    heal: str


def described(fields: Mapping[str, Any]) -> Described | None:
    """The exchange between jobs that a config asks for; None on a mesh."""
    if not is_separate_job(fields):
        return None
    lingers = fields["exchange"] == "peers"
    return Described(lingers, fields["region"], fields["regions"], fields["heal"])


def ends_by_rounds(fields: Mapping[str, Any], method: Method) -> bool:
    """Whether regions go at a pace of their own: jobs have rounds in common, but no steps."""
    return is_separate_job(fields) and method.schedule.by_rounds
