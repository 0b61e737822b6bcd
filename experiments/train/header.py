"""The first record of a metrics file: the run, its machine, its versions, bytes of a payload."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import importlib.metadata
import math
import os
import platform
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from experiments.progress import size
from experiments.train.assemble import Run
from experiments.workdir import PLACES, differences
from lowcomm_jax.checkpoint.load import State, dotted
from lowcomm_jax.exchange import two_shot
from lowcomm_jax.models import Pipeline, TransformerConfig
from lowcomm_jax.models.protocol import abstract_params, flops_per_token, param_count
from lowcomm_jax.params.layout import make_layout
from lowcomm_jax.sync.round_programs import RoundPrograms

_OF_THE_JOB = ("config", "steps", "regions", "here", "tokens_per_step")
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def header(run: Run, state: State) -> dict[str, Any]:
    """Describe a run that is about to start."""
    job, seq_len = run.job, run.job.data.seq_len
    programs = run.engine.sync_loop(state).programs
    shapes = programs.step.layout.train_shapes().values()
    trained = sum(math.prod(leaf.shape) for leaf in shapes)
    allreduce = two_shot(4 * trained, np.ones(job.regions, bool)).sent
    consensus = job.method.topology and job.method.topology.consensus
    return {
        "kind": "header",
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "method": job.method.name,
        **{name: getattr(job, name) for name in _OF_THE_JOB},
        "params": param_count(run.whole),
        "trained_params": trained,
        "flops_per_token": flops_per_token(run.model, seq_len),
        "pipeline": run.model.report() if isinstance(run.model, Pipeline) else None,
        "fragment_bytes": _payloads(programs),
        "allreduce_bytes_per_step": int(allreduce[0]),
        "consensus": consensus and dataclasses.asdict(consensus),
        "data": run.data.summary,
        "data_identity": run.data.identity,
        "began": run.fault_hooks and run.fault_hooks.began,
        "machine": machine(),
        "versions": versions(),
    }


def trained_and_sent(run: Run) -> str:
    """What is trained, what is frozen, and what travels, in a line."""
    method, plain = run.job.method, run.engine.plain
    layout = make_layout(abstract_params(run.model), plain.setup.roles)
    sizes = collections.Counter()
    for role, shape in zip(layout.roles, layout.shapes):
        sizes[role] += math.prod(shape)
    sent = [f"what channel {channel.name} selects" for channel in method.channels]
    if method.has_anchor or method.signal == "gradient":
        payloads = _payloads(plain.programs_for(layout))
        when = "a step" if method.signal == "gradient" else "a synchronisation"
        parts = f", in {len(payloads)} fragments" if len(payloads) > 1 else ""
        sent.insert(0, f"{size(sum(payloads))} {when}{parts}")
    payload = " and ".join(sent) or "nothing"
    return (
        f"{sizes['train']:,} parameters, {sizes['frozen']:,} frozen; a region's payload: {payload}"
    )


def _payloads(programs: RoundPrograms) -> list[int]:
    """Bytes of a region's payload of each fragment."""
    fragments = programs.fragments
    return [programs.exchange.nbytes(fragments.like(p)) for p in range(len(fragments))]


def origin(run: Run) -> dict[str, Any]:
    """What a checkpoint keeps of what a run reads and of where it computes."""
    return {"data_identity": run.data.identity, "data": text(run), "place": place(run)}


def text(run: Run) -> dict[str, str]:
    """The names and digests of what a run reads, by their fields in a config."""
    summary = run.data.summary
    return {
        f"data.{name}": f"{summary[name]} (digest {summary[f'{name}_digest'][:12]})"
        for name in ("corpus", "tokenizer")
    }


def place(run: Run) -> dict[str, Any]:
    """Where and how a run computes, by dotted name; it may change when the run continues."""
    how = run.way.model
    model = dataclasses.asdict(how) if isinstance(how, TransformerConfig) else {}
    found = dotted({**run.job.config, "mesh": dict(run.job.mesh.shape), "model": model})
    kept = {name: found[name] for name in (*PLACES, "eval.sequences") if name in found}
    return {"device": jax.devices()[0].device_kind, **kept}


def changes(before: Mapping[str, Any], run: Run) -> list[str]:
    """What is another since the checkpoint that a run continues, a sentence for each effect.

    Args:
      before: the `place` that the checkpoint was written in.
    """
    found = [line.replace(": ", " ", 1) for line in differences(before, place(run))]
    judged = [line for line in found if line.startswith("eval.")]
    moved = ", ".join(line for line in found if line not in judged)
    return [f"{moved}: numbers may differ in their last digits"] * bool(moved) + [
        f"{line}: losses before and after are of other texts" for line in judged
    ]


def machine() -> dict[str, Any]:
    """The machine, in a few words and numbers."""
    device = jax.devices()[0]
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "backend": jax.default_backend(),
        "device": device.device_kind,
        "devices": jax.device_count(),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide numbers."""
    return {"python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in _PACKAGES
    }
