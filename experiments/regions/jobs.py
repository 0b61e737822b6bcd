"""Regions as separate jobs: the config's fields of their exchange, and checks of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

from experiments.train.processes import process_problems
from lowcomm_jax import exchange
from lowcomm_jax.methods import Method
from lowcomm_jax.runtime.connect import flight_problems
from lowcomm_jax.runtime.kv import url_problems
from lowcomm_jax.runtime.terms import Heal
from lowcomm_jax.schedule import Arrivals, Learners

EXCHANGES = {"store": exchange.store, "peers": exchange.peers}
"""Exchanges between separate jobs, by their name in a config."""

PEERS = {"address": "127.0.0.1:0", "certificates": None}
"""Fields that only `exchange=peers` reads, with their defaults."""


def is_separate_job(fields: Mapping[str, Any]) -> bool:
    """Whether this job trains one region, and other jobs the others."""
    return fields["exchange"] in EXCHANGES


@dataclasses.dataclass(frozen=True)
class Described:
    """What refusals read of an exchange that is not open yet (`setup.BetweenJobs`)."""

    kind: str
    region: int
    count: int
    heal: str


def described(fields: Mapping[str, Any]) -> Described | None:
    """The exchange between jobs that a config asks for; None on a mesh."""
    if not is_separate_job(fields):
        return None
    return Described(fields["exchange"], fields["region"], fields["regions"], fields["heal"])


def ends_by_rounds(fields: Mapping[str, Any], method: Method) -> bool:
    """Whether regions go at a pace of their own: jobs have rounds in common, but no steps."""
    return is_separate_job(fields) and method.schedule.uneven


def exchange_problems(fields: Mapping[str, Any], method: Method | None) -> list[str]:
    """Settings of the exchange that cannot work, or that have no effect."""
    kind, count = fields["exchange"], fields["regions"]
    found = process_problems(fields)
    if kind == "mesh":
        return found + [
            f"{name}={fields[name]!r} has no effect with exchange=mesh: leave it out"
            for name in ("region", "rendezvous", "secret", "heal")
            if fields[name] not in (None, "stop")
        ]
    if not is_separate_job(fields):
        return [*found, f"exchange={kind!r}: use mesh, {' or '.join(EXCHANGES)}"]
    region, url = fields["region"], fields["rendezvous"]
    if region is None or not 0 <= region < count:
        found.append(f"region={region}: say which of the {count} this job is, 0 to {count - 1}")
    if not url:
        found.append(
            "rendezvous is missing: give a folder that all jobs reach, file:///..., gs:// or s3://"
        )
    else:
        found += [f"rendezvous: {problem}" for problem in url_problems(url)]
    if kind == "peers":
        found += flight_problems()
    else:
        found += [
            f"{name}={fields[name]!r} has no effect with exchange={kind}: leave it out"
            for name, default in PEERS.items()
            if fields[name] != default
        ]
    if fields["heal"] not in get_args(Heal):
        found.append(f"heal={fields['heal']!r}: use {', '.join(get_args(Heal))}")
    if not fields["wait_minutes"] > 0:
        found.append(f"wait_minutes={fields['wait_minutes']}: give a time above 0")
    if fields["participation"] != 1:
        found.append(
            f"participation={fields['participation']}: with jobs of their own regions take part "
            "whenever their jobs run; leave it at 1"
        )
    if method is None:
        return found
    rounds = isinstance(method.schedule, Arrivals | Learners)
    if rounds and not method.schedule.violations(count):
        first = method.schedule.opens(0)
        if fields["steps"] < first:
            found.append(f"steps={fields['steps']}: the first round is at step {first}; give more")
    return found
