"""Open the exchange with the other jobs that a region's config asks for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from experiments.faults.fault_hooks import ScriptedFaults
from experiments.regions.jobs import EXCHANGES, PEERS, is_separate_job
from experiments.train.job import Job
from experiments.workdir import identity
from lowcomm_jax.runtime.connect import ROUNDS_KEPT, JobExchange
from lowcomm_jax.runtime.timing import Timing

_OWN = ("region", "mesh", "microbatches", "accumulate", "replicas", "block", "offload")
"""Fields in which the jobs of a run may differ: where and how each computes."""


def open_exchange(job: Job, fault_hooks: ScriptedFaults | None = None) -> JobExchange | None:
    """Open the exchange of a checked job; it has not joined the others yet. None on a mesh.

    Args:
      fault_hooks: faults that this job injects into its own payloads; None = none.

    Raises:
      ValueError: the rendezvous or the secret cannot be used.
    """
    fields = job.config
    if not is_separate_job(fields):
        return None
    kind = fields["exchange"]
    given = {} if kind == "store" else {name: fields[name] for name in PEERS}
    return EXCHANGES[kind](
        fields["rendezvous"],
        fields["region"],
        fields["regions"],
        run_id(fields),
        secret=fields["secret"],
        timing=Timing.between(fields["rendezvous"], deadline_s=fields["deadline_s"]),
        keep=ROUNDS_KEPT[kind] * job.method.schedule.fragments,
        heal=fields["heal"],
        mishaps=fault_hooks,
        **given,
    )


def run_id(fields: Mapping[str, Any]) -> str:
    """Digest of the fields that all jobs of a run share; the others refuse a job with another."""
    shared = {k: v for k, v in identity(fields).items() if k not in _OWN}
    text = json.dumps(shared, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
