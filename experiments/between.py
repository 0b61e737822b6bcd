"""One job per region: what the config says of it, and the exchange it asks for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

from experiments.distributed import process_problems
from experiments.faults.mishaps import ScriptedMishaps
from experiments.workdir import identity
from lowcomm_jax import exchange
from lowcomm_jax.exchange import JobExchange
from lowcomm_jax.exchange.between.connect import ROUNDS_KEPT
from lowcomm_jax.exchange.between.terms import Heal
from lowcomm_jax.guard import Guard
from lowcomm_jax.jobs.checks import job_problems
from lowcomm_jax.methods import Method

if TYPE_CHECKING:
    from experiments.job import Job

BETWEEN = {"store": exchange.store, "peers": exchange.peers}


def alone(fields: Mapping[str, Any]) -> bool:
    """Whether this job is one region of several."""
    return fields["exchange"] in BETWEEN


def between_problems(fields: Mapping[str, Any], method: Method | None) -> list[str]:
    """Settings of the exchange that cannot work, or that nothing would read."""
    kind, count = fields["exchange"], fields["regions"]
    found = process_problems(fields)
    if kind == "mesh":
        return found + [
            f"{name}={fields[name]!r} has no effect with exchange=mesh: leave it out"
            for name in ("region", "rendezvous", "secret", "heal")
            if fields[name] not in (None, "stop")
        ]
    if not alone(fields):
        return [*found, f"exchange={kind!r}: use mesh, {' or '.join(BETWEEN)}"]
    region, url = fields["region"], fields["rendezvous"]
    if region is None or not 0 <= region < count:
        found.append(f"region={region}: say which of the {count} this job is, 0 to {count - 1}")
    if not url:
        found.append("rendezvous is missing: a folder all jobs reach, file:///..., gs:// or s3://")
    if fields["address"] != "127.0.0.1:0" and kind != "peers":
        found.append(f"address={fields['address']!r} has no effect with exchange={kind}")
    if fields["heal"] not in get_args(Heal):
        found.append(f"heal={fields['heal']!r}: use {', '.join(get_args(Heal))}")
    if not fields["wait_minutes"] > 0:
        found.append(f"wait_minutes={fields['wait_minutes']}: give a time above 0")
    if fields["participation"] != 1:
        found.append(
            f"participation={fields['participation']}: with jobs of their own, regions are absent "
            "when they are; leave it at 1"
        )
    if method is None:
        return found
    return found + job_problems(method, count, Guard(**fields["guards"]))


def open_exchange(job: Job, mishaps: ScriptedMishaps | None = None) -> JobExchange | None:
    """The exchange of a checked job, not joined yet; None on a mesh.

    Args:
      mishaps: what goes wrong in it on purpose; None = nothing.

    Raises:
      ValueError: the rendezvous or the secret cannot be used.
    """
    fields = job.config
    if not alone(fields):
        return None
    kind = fields["exchange"]
    given = {} if kind == "store" else {"address": fields["address"]}
    return BETWEEN[kind](
        fields["rendezvous"],
        fields["region"],
        fields["regions"],
        run_id(fields),
        secret=fields["secret"],
        timing=exchange.Timing(deadline_s=fields["deadline_s"]),
        keep=ROUNDS_KEPT[kind] * job.method.schedule.fragments,
        heal=fields["heal"],
        mishaps=mishaps,
        **given,
    )


_OWN = ("region", "mesh", "microbatches", "accumulate", "replicas", "block", "offload")
"""Fields in which the jobs of a run may differ: where and how each of them computes."""


def run_id(fields: Mapping[str, Any]) -> str:
    """Digest of what all jobs of a run have in common: jobs of another config are strangers."""
    shared = {k: v for k, v in identity(fields).items() if k not in _OWN}
    text = json.dumps(shared, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
