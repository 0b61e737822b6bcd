"""The exchange that a region's config asks for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from experiments.faults.fault_hooks import ScriptedFaults
from experiments.regions.jobs import BETWEEN, alone
from experiments.train.job import Job
from experiments.workdir import identity
from lowcomm_jax.runtime.connect import ROUNDS_KEPT, JobExchange
from lowcomm_jax.runtime.timing import Timing

_OWN = ("region", "mesh", "microbatches", "accumulate", "replicas", "block", "offload")
"""Fields in which the jobs of a run may differ: where and how each of them computes."""


def open_exchange(job: Job, mishaps: ScriptedFaults | None = None) -> JobExchange | None:
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
        timing=Timing(deadline_s=fields["deadline_s"]),
        keep=ROUNDS_KEPT[kind] * job.method.schedule.fragments,
        heal=fields["heal"],
        mishaps=mishaps,
        **given,
    )


def run_id(fields: Mapping[str, Any]) -> str:
    """Digest of what all jobs of a run have in common: jobs of another config are strangers."""
    shared = {k: v for k, v in identity(fields).items() if k not in _OWN}
    text = json.dumps(shared, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
