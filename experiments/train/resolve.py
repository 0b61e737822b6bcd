"""Check a training config and give the `Job`; nothing is compiled or started.

`resolve` raises one error with all problems that it can find without the corpus. `assemble` refuses
those that only the corpus, the tokenizer or the engine can show.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from experiments.cli import problems_of, refuse_any
from experiments.config import plain
from experiments.faults import happened, scripts
from experiments.refusals import STAGES, Asked, run_problems
from experiments.regions import jobs
from experiments.train import devices, sections
from experiments.train.job import Job, make_model, policy_rows, settings
from experiments.train.methods import make_method
from experiments.train.model import build, described
from experiments.train.parts import inner_config
from experiments.workdir import as_begun, workdir_problems
from lowcomm_jax import refusals
from lowcomm_jax.aot import Target
from lowcomm_jax.jobs.job_traffic import traffic_of
from lowcomm_jax.models import Trainable, TransformerConfig
from lowcomm_jax.models.protocol import abstract_params, stacked_prefixes
from lowcomm_jax.optimizers import make_optimizer
from lowcomm_jax.params.fragments import path_name
from lowcomm_jax.params.layout import Layout, make_layout
from lowcomm_jax.refused import Problem, at_least
from lowcomm_jax.setup import CONFIG_FIELDS, Setup
from lowcomm_jax.sync.fit import cut_of, fitted


def resolve(config: Any, workdir: str | Path, target: Target | None = None) -> Job:
    """Check a config and its work directory.

    The first call also cuts a processor into as many devices as the mesh needs (`devices.provide`).

    Args:
      target: accelerators whose devices the mesh is made of; None = this machine's.

    Raises:
      RefusedError: every violation, each with its fix.
    """
    fields = plain(config)
    refuse_any(sections.shape_problems(fields))
    fields = as_begun(Path(workdir), fields)
    if target is None:
        devices.provide(fields["mesh"])
    mesh, misplaced = sections.make_mesh_of(fields, target)
    steps = sections.steps_of(fields)
    data, problems = sections.data_config(fields)
    model, settled, found = described(fields)
    problems += found
    decoder, stacked = isinstance(model, TransformerConfig), ()
    if decoder and fields["mesh"]["stage"] > 1 and model.layer_loop == "auto":
        model = dataclasses.replace(model, layer_loop="scan")
    if model is not None:
        built = build(model, None if mesh is None else mesh.devices.flat[0])
        stacked = stacked_prefixes(built)
    if decoder:
        fields["model"]["layer_loop"] = built.config.layer_loop  # it stays if the run moves on
        model = dataclasses.replace(model, layer_loop=built.config.layer_loop)
    method, found = make_method(fields["method"], stacked, fields["seed"])
    problems += found
    weights, no_weights = sections.region_weights(fields)
    problems += no_weights
    inner, found = inner_config(fields["inner"])
    problems += found
    if inner is not None:
        problems += [f"inner.{line}" for line in inner.violations(steps if steps > 0 else 1 << 62)]
    problems += misplaced
    lasts = max(fields["regions"], 1), max(steps, 1)
    script, same = fields["faults"], happened.settings(fields, lasts[1])
    job_faults, found = scripts.read(script, *lasts, same)
    problems += found
    job = Job(
        fields, Path(workdir), steps, model, settled, data, method, inner, mesh, weights, job_faults
    )
    memory = devices.memory_of_machine() if target is None else None
    shape = model if decoder else None
    asked = Asked(fields, steps, method, mesh, shape, job_faults, memory)
    problems += run_problems(asked)
    misfits = run_problems(asked, STAGES)
    problems += _engine_problems(job, misfits, {"weights"} if no_weights else set())
    problems += workdir_problems(job.workdir, fields)
    refuse_any(problems)
    return job


_NAMES = {**CONFIG_FIELDS, "hops": "random_routing", "fragments": "method.fragments"}
_NAMES |= {name: f"adaptive.{name}" for name in ("scaling", "largest_microbatch")}
"""Setting of an engine -> its name in a config, where that is another."""


def _as_in_config(problem: Problem, fields: dict[str, Any]) -> str:
    """A line about an engine's setting, with the name and the value that a config has."""
    about, text = problem
    if about == "method":
        return f"method.{text}"
    head, colon, fix = text.partition(": ")
    if about == "weights" and head.startswith("weights="):
        head = f"weights={fields['weights']!r}"
    if head.startswith(about):
        head = _NAMES.get(about, about) + head.removeprefix(about)
    return head + colon + fix


def _engine_problems(job: Job, misfits: Sequence[str], told: set[str]) -> list[str]:
    """What the engine refuses, of its settings and on parameters of these shapes.

    Args:
      misfits: stages that do not fit; the model cannot be made then.
      told: settings whose problems were told already.
    """
    unknown, model = {"reference_batch", *told}, None  # (`batch` was checked)
    unknown |= {name for name in ("mesh", "method") if getattr(job, name) is None}
    if job.model is None or job.mesh is None or misfits:
        unknown |= {"loss_fn"}
    else:
        model = make_model(job, job.model)
    inner = None
    if job.inner is not None and not job.inner.violations(job.steps):
        inner = make_optimizer(job.inner, job.steps, stacked_prefixes(model) if model else ())
    unknown |= {"inner"} if inner is None else set()
    setup = Setup(inner=inner, **settings(job, model, jobs.described(job.config)))
    problems = refusals.problems(setup, policy_rows(job), unknown)
    unusable = unknown | {problem.about for problem in problems}
    if model is None:
        return [_as_in_config(problem, job.config) for problem in problems]
    layout, found = _layout(job, model)
    if layout is not None and "method" not in unknown:
        problems += _unfit(setup, layout, unusable)
    return [_as_in_config(problem, job.config) for problem in problems] + found


def _layout(job: Job, model: Trainable) -> tuple[Layout | None, list[str]]:
    """(the layout of the model's parameters, what is wrong with the names that are frozen)."""
    found, shapes = [], abstract_params(model)
    names = [path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(shapes)[0]]
    try:
        found += [
            f"frozen: {pattern!r} matches no parameter; names look like {names[0]!r}"
            for pattern in job.config["frozen"]
            if not any(re.search(pattern, name) for name in names)
        ]
    except (re.error, TypeError):
        return None, found  # which `run_problems` tells
    layout, more = problems_of(lambda: make_layout(shapes, job.roles), "frozen: ")
    return layout, found + more


_OF_THE_FIT = {"inner", "method", "regions", "mesh", "replicas", "exchange", "network"}
"""Settings that `fitted` reads."""


def _unfit(setup: Setup, layout: Layout, unusable: set[str]) -> list[Problem]:
    """What does not fit the parameters; of unusable settings, how the parameters are cut alone."""
    if unusable.isdisjoint(_OF_THE_FIT):
        if setup.method.adapts:  # its trainers' engine has no network
            setup = dataclasses.replace(setup, network=None)
        return fitted(setup, layout, traffic_of(setup))[1]
    if at_least("fragments", setup.method.schedule.fragments, 1) is not None:
        return []
    return cut_of(setup, layout)[1]
