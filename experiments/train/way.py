"""How a run computes its model: the fastest of `model.ways` whose memory its devices have.

The compiler says what the inner step needs. A way that keeps more for the backward pass than there
is room is not compiled, so usually at most one program is compiled that the run does not use.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.shape import read_json
from experiments.train.job import Job, make_engine, make_model
from experiments.train.model import Described, build, ways
from experiments.workdir import write_whole
from lowcomm_jax.mesh.leader import leader
from lowcomm_jax.models.protocol import abstract_params
from lowcomm_jax.rounds.remote import RemoteExchange

FREE = 0.05
"""Share of a device's memory that is left for what the compiled programs do not show."""
STORED = "way.json"
"""File of a run's folder: the choice, and the devices that it was made for."""


@dataclasses.dataclass(frozen=True)
class Way:
    """How the model of a run is computed.

    Attributes:
      model: with `remat` decided.
      chosen: what `STORED` holds; None where there was nothing to choose.
    """

    model: Described
    chosen: dict[str, Any] | None = None

    @property
    def line(self) -> str | None:
        """The choice, for the run's first lines."""
        if self.chosen is None:
            return None
        tiles = f", the loss in {self.model.loss_tiles} parts" * (self.model.loss_tiles > 1)
        room = self.chosen["devices"]["room"] / 1e9
        return f"remat={self.model.remat}{tiles}: the fastest in {room:.1f} GB of a device's memory"

    def store(self, workdir: Path) -> None:
        """Keep the choice in the run's folder."""
        if self.chosen is not None:
            write_whole(workdir / STORED, json.dumps(self.chosen, indent=1) + "\n")


def fastest_way(job: Job, model: Described, exchange: RemoteExchange | None) -> Way:
    """The fastest way to compute this model in the memory of the job's devices.

    A choice that the run's folder has for the same devices and batch is taken again.

    Args:
      exchange: see `make_engine`.
    """
    options, room = ways(model), _room(job)
    if len(options) == 1 or room is None:
        return Way(options[0])
    if job.mesh.shape["stage"] > 1:  # stages make the logits of a microbatch at a time
        options = [option for option in options if option.loss_tiles == model.loss_tiles]
    kind = job.mesh.devices.flat[0].device_kind
    batch = {"batch": job.batch, "accumulate": job.config["accumulate"]}
    devices = {"kind": kind, "mesh": dict(job.mesh.shape), "room": room, **batch}
    choice = _stored(job.workdir, devices, options)
    if choice is None:
        last = len(options) - 1
        fits = (i for i in range(last) if _fits(job, options[i], exchange, room))
        choice = next(fits, last)
    choice = max(leader().everyones("how the model is computed", choice))
    found = options[choice]
    settings = {"remat": found.remat, "loss_tiles": found.loss_tiles}
    return Way(found, {"devices": devices, **settings})


def _stored(workdir: Path, devices: dict, options: list[Described]) -> int | None:
    if not (workdir / STORED).is_file():
        return None
    there = read_json(workdir / STORED, f"--workdir={workdir}", "remove it")
    for i, option in enumerate(options):
        settings = {"remat": option.remat, "loss_tiles": option.loss_tiles}
        if there == {"devices": devices, **settings}:
            return i
    return None


def _room(job: Job) -> int | None:
    """Bytes of a device that the run may use; None where the device does not say (CPUs)."""
    here = [d for d in job.mesh.devices.flat if d.process_index == jax.process_index()]
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in here]
    return None if None in limits else int((1 - FREE) * min(limits))


def _fits(job: Job, described: Described, exchange: RemoteExchange | None, room: int) -> bool:
    if job.mesh.shape["stage"] == 1 and kept_bytes(job, described) > room:
        return False
    return needed_bytes(job, described, exchange) <= room


def needed_bytes(job: Job, described: Described, exchange: RemoteExchange | None) -> float:
    """Bytes of a device that the run's programs need, by the compiler; infinite = it refuses.

    Of one of several jobs, and of trainers, the inner step alone.
    """
    # Where memory is known: no job needs it to meet the others.
    from lowcomm_jax.aot.programs import TooLargeError, compile_engine

    model = make_model(job, described)
    engine, params = make_engine(job, model, exchange).plain, abstract_params(model)
    inner_alone = exchange is not None or job.method.adapts
    try:
        made = compile_engine(engine, params, _batch(job, 1), inner_alone=inner_alone)
    except TooLargeError:
        return math.inf
    return max(program.needs(made.resident) for program in made.programs)


def kept_bytes(job: Job, described: Described) -> float:
    """Bytes of a device that the forward pass keeps for the backward pass, from shapes alone."""
    model = build(described, job.mesh.devices.flat[0])
    slots = job.mesh.shape["region"]
    regions = len(job.here) // slots if job.config["replicas"] == "vmap" else 1

    def pull(params, batch, rng):
        return jax.vjp(lambda p: model.loss_fn(p, batch, rng), params, has_aux=True)[1]

    batch = _batch(job, job.config["accumulate"])
    kept = jax.eval_shape(pull, abstract_params(model), batch, jax.random.key(0))
    nbytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(kept))
    return regions * nbytes / (job.mesh.size // slots)


def _batch(job: Job, parts: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a region's batch, or of one of its parts."""
    shape = max(1, job.batch // parts), job.data.seq_len + 1
    return {"tokens": jax.ShapeDtypeStruct(shape, np.int32)}
