"""How a run computes its model: the fastest of `models.config.ways` whose memory its devices have.

The compiler says what the fastest one needs. What the others keep less for the backward pass is
counted from shapes. So at most one program is compiled that the run does not use.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np

from experiments.train.job import Job, abstract_params, make_engine, make_model
from lowcomm_jax.aot.programs import TooLargeError, compile_engine, device_bytes
from lowcomm_jax.checkpoint.trainers import plain_engine
from lowcomm_jax.mesh.leader import leader
from lowcomm_jax.models import TransformerConfig, build
from lowcomm_jax.models.config import ways
from lowcomm_jax.params.layout import make_layout
from lowcomm_jax.runtime.connect import JobExchange
from lowcomm_jax.sync import round_programs
from lowcomm_jax.sync.initial_state import abstract_state

FREE = 0.05
"""Share of a device's memory that is left for payloads, other programs and fragmentation."""


@dataclasses.dataclass(frozen=True)
class Way:
    """How the model of a run is computed.

    Attributes:
      config: with `remat` decided.
      why: a line for the run's header; empty where there was nothing to choose.
    """

    config: TransformerConfig
    why: str = ""

    def chosen_by(self, job: Job) -> Job:
        """The job with the choice in its config, which its folder keeps."""
        if not self.why:
            return job
        chosen = {name: getattr(self.config, name) for name in ("remat", "loss_tiles")}
        model = {**job.config["model"], **chosen}
        return dataclasses.replace(job, config={**job.config, "model": model})


def fastest_way(job: Job, config: TransformerConfig, exchange: JobExchange | None) -> Way:
    """The fastest way to compute this model in the memory of the job's devices.

    Args:
      exchange: see `make_engine`.
    """
    options, room = ways(config), _room(job)
    if len(options) == 1 or room is None:
        return Way(options[0])
    needs = _needs(job, options, exchange)
    last = len(options) - 1
    choice = next((i for i, nbytes in enumerate(needs) if nbytes <= room), last)
    choice = max(leader().everyones("how the model is computed", choice))
    chosen = options[choice]
    tiles = f", the loss in {chosen.loss_tiles} parts" if chosen.loss_tiles > 1 else ""
    sizes = f"about {needs[choice] / 1e9:.1f} of {room / 1e9:.1f} GB"
    return Way(chosen, f"remat={chosen.remat}{tiles}: {sizes} of a device's memory")


def _room(job: Job) -> int | None:
    """Bytes of a device that the run may use; None where the device does not say (CPUs)."""
    here = [d for d in job.mesh.devices.flat if d.process_index == jax.process_index()]
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in here]
    return None if None in limits else int((1 - FREE) * min(limits))


def _needs(job: Job, options: list[TransformerConfig], exchange: JobExchange | None) -> list[float]:
    """Bytes of a device that the inner step needs, computed in each of these ways."""
    model = make_model(job, options[0])
    engine, params = plain_engine(make_engine(job, model, exchange)), abstract_params(model)
    programs = round_programs.build(engine.config, make_layout(params, engine.roles))
    resident = device_bytes(abstract_state(programs, params))
    batch = {"tokens": jax.ShapeDtypeStruct((job.batch, job.data.seq_len + 1), np.int32)}
    estimates = [resident + _kept(job, option) for option in options]
    try:
        first = compile_engine(engine, params, batch, inner_alone=True).programs[0]
    except TooLargeError:
        return [math.inf, *estimates[1:]]
    beside = first.needs(resident) - estimates[0]
    return [estimate + beside for estimate in estimates]


def _kept(job: Job, config: TransformerConfig) -> float:
    """Bytes of a device that the forward pass keeps for the backward pass, from shapes alone."""
    model = build(config, job.mesh.devices.flat[0])
    regions = job.regions // job.mesh.shape["region"] if job.config["replicas"] == "vmap" else 1
    sequences = max(1, job.batch // (job.config["accumulate"] or 1))
    batch = {"tokens": jax.ShapeDtypeStruct((sequences, job.data.seq_len + 1), np.int32)}

    def pull(params, batch, rng):
        return jax.vjp(lambda p: model.loss_fn(p, batch, rng), params, has_aux=True)[1]

    kept = jax.eval_shape(pull, abstract_params(model), batch, jax.random.key(0))
    nbytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(kept))
    devices = job.mesh.size // job.mesh.shape["region"]
    return regions * nbytes / devices
