"""`Job`: a checked training run. Here also: its model and its engine, of which nothing is compiled.

`resolve` makes jobs; `assemble` adds the data.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from experiments.faults.scripts import Faults
from experiments.regions.jobs import ends_by_rounds, is_separate_job
from experiments.train.model import Described, build
from lowcomm_jax import AdaptiveEngine, Engine
from lowcomm_jax.adloco.setup import AdaptiveSetup
from lowcomm_jax.checkpoint.load import dotted
from lowcomm_jax.data import DataConfig
from lowcomm_jax.methods import Method
from lowcomm_jax.models import Pipeline, Trainable
from lowcomm_jax.models.protocol import abstract_params, stacked_prefixes
from lowcomm_jax.optimizers import InnerConfig, learning_rate, make_optimizer
from lowcomm_jax.params.fragments import path_name
from lowcomm_jax.rounds.remote import RemoteExchange
from lowcomm_jax.settings import config_fields
from lowcomm_jax.setup import BetweenJobs, DescribedExchange, Setup


@dataclasses.dataclass(frozen=True)
class Job:
    """A checked training run.

    Attributes:
      config: the config as plain dicts.
      workdir: where everything is written.
      steps: inner steps; tokens of all regions are `steps * tokens_per_step`.
      model: what the section describes, not built yet; `vocab_size` is provisional unless the
        config or the starting weights give it (`vocab_settled`).
      data, method, inner, mesh: what the sections describe.
      weights: `equal`, `tokens` or numbers.
      faults: simulated ones, those a real job must do to itself, or what happened to some.
      saves_result: whether a checkpoint is written at the end; one of an interrupt always is.
    """

    config: dict[str, Any]
    workdir: Path
    steps: int
    model: Described
    vocab_settled: bool
    data: DataConfig
    method: Method
    inner: InnerConfig
    mesh: jax.sharding.Mesh
    weights: str | tuple[float, ...]
    faults: Faults = ()
    saves_result: bool = True

    @property
    def regions(self) -> int:
        return self.config["regions"]

    @property
    def here(self) -> list[int]:
        """Numbers of the regions that this job trains."""
        return (
            [self.config["region"]] if is_separate_job(self.config) else list(range(self.regions))
        )

    @property
    def by_rounds(self) -> bool:
        """Whether it ends, stops and evaluates by rounds: `steps` are those of the fastest job."""
        return ends_by_rounds(self.config, self.method)

    @property
    def batch(self) -> int:
        return self.config["batch"]

    @property
    def tokens_per_step(self) -> int:
        return self.regions * self.batch * self.data.seq_len

    @property
    def microbatches(self) -> int:
        """Microbatches in flight through the stages of a region."""
        return microbatch_count(self.config, self.mesh.shape["fsdp"])

    def roles(self, name: str, leaf: Any) -> str:
        """`frozen` for the leaves a regex of the config names, else `train`."""
        del leaf
        return "frozen" if any(re.search(p, name) for p in self.config["frozen"]) else "train"


def microbatch_count(fields: Mapping[str, Any], fsdp: int) -> int:
    """Microbatches in flight through the stages of a region."""
    part = fields["batch"] // max(fields["accumulate"], 1)
    return fields["microbatches"] or max(part // fsdp, 1)


def make_model(job: Job, described: Described) -> Trainable:
    """The model of a job that is so described, in stages where the mesh has some."""
    model = build(described, job.mesh.devices.flat[0])
    if job.mesh.shape["stage"] == 1:
        return model
    routed, schedule = job.config["random_routing"], job.config["pipeline_schedule"]
    seed = job.config["seed"]
    return Pipeline(model, job.mesh, job.microbatches, routed, schedule, seed)


def make_engine(
    job: Job, model: Trainable, exchange: RemoteExchange | DescribedExchange | None = None
) -> Engine | AdaptiveEngine:
    """The engine of a job; nothing is compiled yet. A batch's schedule counts nominal steps.

    Args:
      exchange: with the other jobs (`assemble.open_exchange`), described where the engine is not to
        train; None on a mesh.

    Raises:
      ValueError: everything the engine refuses.
    """
    given, inner, stacked = settings(job, model, exchange), job.inner, stacked_prefixes(model)
    if not job.method.adapts:
        return Engine(inner=make_optimizer(inner, job.steps, stacked), **given)
    constant = dataclasses.replace(inner, schedule="constant", warmup_steps=0)
    rate, nominal = learning_rate(inner, job.steps), job.regions * job.batch
    return AdaptiveEngine(
        inner=make_optimizer(constant, job.steps, stacked),
        schedule=lambda samples: rate(samples / nominal) / inner.learning_rate,
        **given,
    )


def settings(
    job: Job, model: Trainable | None, exchange: BetweenJobs | None = None
) -> dict[str, Any]:
    """Keywords of the job's engine, without the inner optimizer.

    Args:
      model: None = it cannot be made; there is no loss function then.
      exchange: with the other jobs, open or described; None on a mesh.
    """
    config = job.config
    flat = dotted(config)
    given = {name: flat[field] for name, field in config_fields(_record(job)).items()}
    given |= {"reference_batch": job.batch} if _record(job).adaptive else {}
    given |= {"network": config["network"], "seed": config["seed"]}
    given |= {"method": job.method, "regions": job.regions, "mesh": job.mesh, "roles": job.roles}
    given |= {"weights": job.weights, "exchange": exchange or "mesh", "batches": "own"}
    given |= {"hops": Pipeline.hops} if config["random_routing"] else {}
    if model is None:
        return given | {"loss_fn": None}
    given |= {"loss_fn": model.loss_fn, "stacked": stacked_prefixes(model)}
    given |= {"hops": model.hops} if config["random_routing"] else {}
    if not hasattr(model, "specs"):
        return given
    layout = model.specs(abstract_params(model), dict(job.mesh.shape))
    specs = {
        path_name(path): spec for path, spec in jax.tree_util.tree_flatten_with_path(layout)[0]
    }
    return given | {"specs": lambda name, leaf: specs[name]}


def setup_of(job: Job, inner: Any, given: dict[str, Any]) -> Setup:
    """The settings of the job's engine, unchecked; `given` as `settings` has them."""
    return _record(job)(inner=inner, **given)


def _record(job: Job) -> type[Setup]:
    """The record of the settings that the job's engine takes; an `Engine`'s without a method."""
    return AdaptiveSetup if job.method is not None and job.method.adapts else Setup
