"""From a config to a job: everything checked, nothing started.

`resolve` finds every violation that is visible without reading the corpus and refuses them all in
one message.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import checks, devices
from experiments.between import alone, between_problems
from experiments.cli import RefusedError, problems_of
from experiments.config import plain
from experiments.faults.checks import Faults, faults
from experiments.methods import make_method
from experiments.workdir import workdir_problems
from experiments.writers import missing_packages
from lowcomm_jax import AdaptiveEngine, Engine
from lowcomm_jax.data import DataConfig
from lowcomm_jax.exchange import JobExchange
from lowcomm_jax.fragments import partition, path_name
from lowcomm_jax.layout import make_layout
from lowcomm_jax.methods import Method
from lowcomm_jax.models import Model, Pipeline, TransformerConfig, build
from lowcomm_jax.optimizers import InnerConfig, learning_rate, make_optimizer


@dataclasses.dataclass(frozen=True)
class Job:
    """A checked training run.

    Attributes:
      config: the config as plain dicts.
      workdir: where everything is written.
      steps: inner steps; tokens of all regions are `steps * tokens_per_step`.
      model: the transformer; `vocab_size` is provisional unless the config or the starting
        weights give it (`vocab_settled`).
      data, method, inner, mesh: what the sections describe.
      weights: `equal`, `tokens` or numbers.
      faults: simulated ones, those a real job must do to itself, or what happened to some.
    """

    config: dict[str, Any]
    workdir: Path
    steps: int
    model: TransformerConfig
    vocab_settled: bool
    data: DataConfig
    method: Method
    inner: InnerConfig
    mesh: jax.sharding.Mesh
    weights: str | tuple[float, ...]
    faults: Faults = ()

    @property
    def regions(self) -> int:
        return self.config["regions"]

    @property
    def here(self) -> list[int]:
        """Numbers of the regions that this job trains."""
        return [self.config["region"]] if alone(self.config) else list(range(self.regions))

    @property
    def batch(self) -> int:
        return self.config["batch"]

    @property
    def tokens_per_step(self) -> int:
        return self.regions * self.batch * self.data.seq_len

    @property
    def microbatches(self) -> int:
        """Microbatches in flight through the stages of a region."""
        return checks.microbatch_count(self.config, self.mesh.shape["fsdp"])

    def roles(self, name: str, leaf: Any) -> str:
        """`frozen` for the leaves a regex of the config names, else `train`."""
        del leaf
        return "frozen" if any(re.search(p, name) for p in self.config["frozen"]) else "train"


def resolve(config: Any, workdir: str | Path) -> Job:
    """Check a config and its work directory.

    The first call also settles how many devices a processor is cut into (`devices.provide`).

    Raises:
      RefusedError: every violation, each with its fix.
    """
    fields = plain(config)
    problems = checks.shape_problems(fields)
    if problems:
        raise RefusedError(problems)
    devices.provide(fields["mesh"], fields["processes"])
    problems = checks.number_problems(fields)
    steps, found = checks.count_steps(fields)
    problems += found
    data, found = checks.data_config(fields)
    problems += found
    model, settled, found = checks.model_config(fields)
    problems += found
    if model is not None and fields["mesh"]["stage"] > 1 and model.layer_loop == "auto":
        model = dataclasses.replace(model, layer_loop="scan")
    stacked = () if model is None else stacked_prefixes(build(model))
    method, found = make_method(fields["method"], stacked, fields["seed"])
    problems += found
    weights, found = checks.region_weights(fields)
    problems += found
    inner = InnerConfig(**fields["inner"])
    problems += missing_packages(fields["log"])
    problems += [f"inner.{line}" for line in inner.violations(steps if steps > 0 else 1 << 62)]
    mesh, found = checks.make_mesh_of(fields)
    problems += found
    if model is not None and model.max_seq_len < fields["data"]["seq_len"]:
        problems.append(
            f"data.seq_len={fields['data']['seq_len']} is longer than the model is meant for: use "
            f"at most {model.max_seq_len}, or raise model.max_seq_len"
        )
    struck, found = faults(fields, steps, method)
    problems += found
    job = Job(
        fields, Path(workdir), steps, model, settled, data, method, inner, mesh, weights, struck
    )
    problems += checks.region_problems(fields, mesh) + checks.network_problems(fields, method)
    problems += checks.adaptive_problems(fields, method) + between_problems(fields, method)
    unstaged = checks.stage_problems(fields, mesh, model)
    problems += unstaged
    if method is not None and mesh is not None and not unstaged:
        problems += _method_problems(job)
    problems += workdir_problems(job.workdir, fields)
    if problems:
        raise RefusedError(problems)
    return job


def _method_problems(job: Job) -> list[str]:
    """What the method refuses, and fragments that do not fit the parameters."""
    found = [f"method.{line}" for line in job.method.violations(max(job.regions, 1))]
    if job.model is None:
        return found
    model = make_model(job, job.model)
    shapes = abstract_params(model)
    names = [path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(shapes)[0]]
    try:
        found += [
            f"frozen: {pattern!r} matches no parameter; names look like {names[0]!r}"
            for pattern in job.config["frozen"]
            if not any(re.search(pattern, name) for name in names)
        ]
    except re.error:
        return found  # reported by `checks.number_problems`
    layout, more = problems_of(lambda: make_layout(shapes, job.roles), "frozen: ")
    if layout is None or job.method.schedule.fragments < 1:
        return found + more
    trained, method = layout.select(shapes, "train"), job.method
    stacked, stages = stacked_prefixes(model), job.mesh.shape["stage"]
    cut = (method.schedule.fragments, method.pattern, method.rest, stacked, stages)
    return found + problems_of(lambda: partition(trained, *cut), "method: ")[1]


def make_model(job: Job, config: TransformerConfig) -> Model | Pipeline:
    """The model of a job with this config, in stages where the mesh has some."""
    if job.mesh.shape["stage"] == 1:
        return build(config)
    routed, schedule = job.config["random_routing"], job.config["pipeline_schedule"]
    seed = job.config["seed"]
    return Pipeline(build(config), job.mesh, job.microbatches, routed, schedule, seed)


def abstract_params(model: Model | Pipeline) -> Any:
    """Shapes of the model's parameters."""
    return jax.eval_shape(model.init, jax.random.key(0))


def stacked_prefixes(model: Model | Pipeline) -> tuple[str, ...]:
    """Path prefixes of leaves with a leading layer axis."""
    return ("blocks",) if model.config.layer_loop == "scan" else ()


def make_engine(
    job: Job, model: Model | Pipeline, exchange: JobExchange | None = None
) -> Engine | AdaptiveEngine:
    """The engine of a job; nothing is compiled yet.

    Args:
      exchange: of `between.open_exchange`.

    Raises:
      ValueError: everything the engine refuses.
    """
    stacked = stacked_prefixes(model)
    layout = model.specs(abstract_params(model), dict(job.mesh.shape))
    specs = {
        path_name(path): spec for path, spec in jax.tree_util.tree_flatten_with_path(layout)[0]
    }
    guards = job.config["guards"]
    make, settings, inner = Engine, {"accumulate": job.config["accumulate"]}, job.inner
    if exchange is not None:
        settings["exchange"] = exchange
    if job.config["random_routing"]:
        settings["hops"] = model.hops
    if job.method.adapts:
        make, settings = AdaptiveEngine, _adaptive_settings(job)
        inner = dataclasses.replace(inner, schedule="constant", warmup_steps=0)
    return make(
        model.loss_fn,
        make_optimizer(inner, job.steps, stacked),
        job.method,
        job.regions,
        mesh=job.mesh,
        network=job.config["network"],
        replicas=job.config["replicas"],
        seed=job.config["seed"],
        roles=job.roles,
        weights=job.weights if isinstance(job.weights, str) else np.array(job.weights),
        specs=lambda name, leaf: specs[name],
        stacked=stacked,
        outlier_factor=guards["outlier_factor"],
        max_update_norm=guards["max_update_norm"],
        block=job.config["block"],
        offload=job.config["offload"],
        **settings,
    )


def _adaptive_settings(job: Job) -> dict[str, Any]:
    """What only an `AdaptiveEngine` takes; the schedule counts tokens as nominal steps."""
    given, nominal = job.config["adaptive"], job.regions * job.batch
    rate, peak = learning_rate(job.inner, job.steps), job.inner.learning_rate
    return {
        "schedule": lambda samples: rate(samples / nominal) / peak,
        "scaling": given["scaling"],
        "reference_batch": job.batch,
        "largest_microbatch": given["largest_microbatch"],
        "memory": given["memory_gb"] and int(given["memory_gb"] * 1e9),
        "stack_trainers": given["stack_trainers"],
    }
