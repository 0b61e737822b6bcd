"""Check a training config and give the `Job`; nothing is compiled or started.

`resolve` raises one error with all problems that it can find without the corpus. `assemble` refuses
those that only the corpus, the tokenizer or the engine can show. What a section describes and
cannot be made is None, beside a list of its problems, with their fixes. Fields that do not go
together stand in `experiments.refusals`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from experiments.cli import RefusedError, closest, problems_of, refuse_any
from experiments.config import base, plain
from experiments.faults import happened, scripts
from experiments.refusals import STAGES, TRAIN, Asked, run_problems
from experiments.regions import jobs
from experiments.train import devices
from experiments.train.job import Job, make_model, settings, setup_of
from experiments.train.methods import make_method
from experiments.train.model import build, described, is_own
from experiments.train.parts import inner_config
from experiments.workdir import as_begun, workdir_problems
from lowcomm_jax import make_mesh, methods, refusals
from lowcomm_jax.adloco.setup import AdaptiveSetup
from lowcomm_jax.data import DataConfig, open_corpus
from lowcomm_jax.loops import family_of
from lowcomm_jax.mesh.regions import default_mesh
from lowcomm_jax.models import Trainable, TransformerConfig
from lowcomm_jax.models.protocol import abstract_params, stacked_prefixes
from lowcomm_jax.optimizers import make_optimizer
from lowcomm_jax.params.fragments import path_name
from lowcomm_jax.params.layout import Layout, make_layout
from lowcomm_jax.refused import Problem, Row, at_least
from lowcomm_jax.settings import config_fields
from lowcomm_jax.setup import Setup
from lowcomm_jax.sync.fit import cut_of, fitted

if TYPE_CHECKING:
    from lowcomm_jax.aot import Target


def resolve(
    config: Any,
    workdir: str | Path,
    target: Target | None = None,
    rows: Sequence[Row] = TRAIN,
) -> Job:
    """Check a config and its work directory.

    The first call also cuts a processor into as many devices as the mesh needs (`devices.provide`).

    Args:
      target: accelerators whose devices the mesh is made of; None = this machine's.
      rows: of the table of refusals, those that are asked.

    Raises:
      RefusedError: every violation, each with its fix.
    """
    fields = plain(config)
    refuse_any(_shape_problems(fields))
    fields = as_begun(Path(workdir), fields)
    if target is None:
        devices.provide(fields["mesh"])
    mesh, misplaced = _make_mesh_of(fields, target)
    steps = steps_of(fields)
    data, problems = _data_config(fields)
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
    weights, no_weights = _region_weights(fields)
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
    problems += run_problems(asked, rows)
    misfits = run_problems(asked, STAGES)
    problems += _engine_problems(job, misfits, {"weights"} if no_weights else set())
    problems += workdir_problems(job.workdir, fields)
    refuse_any(problems)
    return job


# -- what sections describe ----------------------------------------------------------------------


def refuse_unreadable(config: Any, problems: Sequence[str] = ()) -> None:
    """Let no config pass that lacks fields: what reads one of them would end in a KeyError.

    Args:
      problems: found before, which are refused with the missing fields.

    Raises:
      RefusedError: fields are missing, or sections are none.
    """
    fields = plain(config)
    if lacks := _absent(fields, _reference(fields)):
        raise RefusedError([*problems, *lacks])


def _reference(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The default config around the method of a config."""
    name = fields.get("method", {}).get("name") if isinstance(fields.get("method"), dict) else None
    return plain(base(name if name in methods.NAMES else "ddp"))


def _has_own_fields(label: str, section: Mapping[str, Any]) -> bool:
    """Whether the fields of a section are its factory's: `make_method` and `model.described`."""
    return label == "method" or (label == "model" and is_own(section))


def _absent(fields: Mapping[str, Any], reference: Mapping[str, Any]) -> list[str]:
    """A line for all fields that are missing, and one for every section that is none."""
    lacks, found = [], []

    def walk(given: Mapping, known: Mapping, prefix: str) -> None:
        for key, default in known.items():
            label = f"{prefix}{key}"
            if key not in given:
                lacks.append(label)
            elif isinstance(default, dict):
                if not isinstance(given[key], Mapping):
                    found.append(
                        f"{label}={given[key]!r}: must be a section of fields; set {label}.FIELD"
                    )
                elif not _has_own_fields(label, given[key]):
                    walk(given[key], default, f"{label}.")

    walk(fields, reference, "")
    if lacks:
        verb = "is" if len(lacks) == 1 else "are"
        found.append(f"{', '.join(lacks)} {verb} missing: start from experiments.config.base")
    return found


def _shape_problems(fields: Mapping[str, Any]) -> list[str]:
    """Fields that are missing, unknown, or of another type than the defaults'."""
    reference = _reference(fields)

    def walk(given: Mapping, known: Mapping, prefix: str) -> list[str]:
        found = [
            f"{prefix}{k}: unknown field{closest(k, list(known))}" for k in given if k not in known
        ]
        for key, default in known.items():
            label = f"{prefix}{key}"
            if key not in given:
                continue
            if isinstance(default, dict):
                if isinstance(given[key], Mapping) and not _has_own_fields(label, given[key]):
                    found += walk(given[key], default, f"{label}.")
            elif not _same_type(given[key], default, optional=label == "inner.clip_norm"):
                kind = type(default).__name__
                found.append(f"{label}={given[key]!r}: must be of type {kind}, like {default!r}")
            elif isinstance(given[key], str) and not _is_utf8(given[key]):
                found.append(f"{label}={given[key]!r} is no UTF-8 text, as records need: rename it")
        return found

    return _absent(fields, reference) + walk(fields, reference, "")


def _is_utf8(text: str) -> bool:
    """False for names of files that are not, which Python reads with surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _same_type(value: Any, default: Any, optional: bool) -> bool:
    if default is None or (optional and value is None):
        return True
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, float | int)
    return isinstance(value, type(default))


def steps_of(fields: Mapping[str, Any]) -> int:
    """Inner steps of the run: as given, else as many as `tokens` of all regions ask for."""
    steps, tokens = fields["steps"], fields["tokens"]
    if steps or tokens is None:
        return steps
    per_step = fields["regions"] * fields["batch"] * fields["data"]["seq_len"]
    return -(-tokens // max(per_step, 1))


def fit_warm_up(config: Any, overrides: Sequence[tuple[str, str]]) -> str:
    """Shorten a warm-up that the run is too short for, where nobody asked for it.

    A tenth of the steps takes the place of the config file's own, in `config`. One that an override
    names stays, and is refused where it does not fit.

    Args:
      config: with every field.

    Returns:
      A sentence that says so; empty where nothing has changed.
    """
    given = {name for name, _ in overrides}
    if "inner.warmup_steps" in given or not given & {"steps", "tokens"}:
        return ""
    steps, warm_up = steps_of(plain(config)), config.inner.warmup_steps
    if steps < 1 or warm_up < steps:
        return ""
    config.inner.warmup_steps = steps // 10
    return (
        f"warm-up: {steps // 10} of {steps} steps; the config's {warm_up} do not fit "
        "(--config.inner.warmup_steps=N sets it)"
    )


def _data_config(fields: Mapping[str, Any]) -> tuple[DataConfig, list[str]]:
    """(the data's config, problems); checks that the corpus can be opened."""
    data = DataConfig(**fields["data"], seed=fields["seed"], regions=fields["regions"])
    found = [line for line in data.violations() if not line.startswith(("regions=", "seed="))]
    found += open_corpus(data)[1]
    return data, [f"data.{line}" for line in found]


def _region_weights(fields: Mapping[str, Any]) -> tuple[str | tuple[float, ...], list[str]]:
    """(`equal`, `tokens` or a number a region; problems)."""
    text = fields["weights"]
    if text in ("equal", "tokens"):
        return text, []
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        return text, [f"weights={text!r}: use equal, tokens, or one number per region: 0.5,0.2,0.3"]
    return numbers, []


def _make_mesh_of(
    fields: Mapping[str, Any], target: Target | None = None
) -> tuple[jax.sharding.Mesh | None, list[str]]:
    """(the mesh, or None if it cannot be made; problems); sizes of 0 are chosen to fit.

    Args:
      target: accelerators whose devices the mesh is made of; None = this machine's.
    """
    shape, regions = dict(fields["mesh"]), fields["regions"]
    number = jax.device_count() if target is None else target.size
    negative = [f"mesh.{k}={v}: give 0 (automatic) or a number" for k, v in shape.items() if v < 0]
    if negative or regions < 1:
        return None, negative
    regions = 1 if jobs.is_separate_job(fields) else regions
    stage, tensor = max(shape["stage"], 1), max(shape["tensor"], 1)
    if target is None and not shape["region"] and not shape["fsdp"] and stage * tensor == 1:
        return default_mesh(regions), []
    room = number // (stage * tensor)
    region = shape["region"] or math.gcd(regions, max(room // max(shape["fsdp"], 1), 1))
    fsdp = shape["fsdp"] or max(room // region, 1)
    if target is not None:
        return problems_of(lambda: target.mesh(region, stage, fsdp, tensor), "mesh: ")
    mesh, found = problems_of(lambda: make_mesh(region, stage, fsdp, tensor), "mesh: ")
    each = math.ceil(region * stage * fsdp * tensor / jax.process_count())
    fix = f"XLA_FLAGS={devices.FLAG}={each} cuts a processor into as many"
    if jax.process_count() > 1:
        fix += f", in each of {jax.process_count()} processes"
    return mesh, [f"{line}; use a smaller mesh (mesh.stage=1), or {fix}" for line in found]


# -- what the engine refuses ---------------------------------------------------------------------

_NAMES = {"hops": "random_routing", "fragments": "method.fragments"}
_NAMES |= config_fields(AdaptiveSetup)
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
    setup = setup_of(job, inner, settings(job, model, jobs.described(job.config)))
    problems = refusals.problems(setup, unknown)
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
        return fitted(setup, layout, family_of(setup.method))[1]
    if at_least("fragments", setup.method.schedule.fragments, 1) is not None:
        return []
    return cut_of(setup, layout)[1]
