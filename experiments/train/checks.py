"""Checks of a training config, section by section; each returns the problems, with their fixes.

Most take the plain fields and return a list of lines. Those that also build something (data,
model, mesh, weights) return it first, or None where it cannot be built.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from experiments.cli import RefusedError, closest, problems_of
from experiments.config import base, plain
from experiments.regions.jobs import is_separate_job
from experiments.shape import read_json
from experiments.train.devices import FLAG
from experiments.train.methods import METHODS
from lowcomm_jax import make_mesh
from lowcomm_jax.aot import Target
from lowcomm_jax.checkpoint.load import dotted
from lowcomm_jax.data import DataConfig, open_corpus
from lowcomm_jax.data.corpora import CorpusSource
from lowcomm_jax.mesh.regions import default_mesh
from lowcomm_jax.methods import Method
from lowcomm_jax.models import TransformerConfig, preset
from lowcomm_jax.models.pipeline.pipeline import pipeline_problems, schedule_problems
from lowcomm_jax.models.weights import config_from_llama
from lowcomm_jax.refused import is_number

PROVISIONAL_VOCABULARY = 320  # until the tokenizer is open; nothing checked here depends on it

_FROM_1 = ("batch", "eval.sequences", "eval.batch", "log.every", "checkpoint.keep_last")


def shape_problems(fields: Mapping[str, Any]) -> list[str]:
    """Fields that are missing, unknown, or of another type than the defaults'."""
    name = fields.get("method", {}).get("name") if isinstance(fields.get("method"), dict) else None
    reference = plain(base(name if name in METHODS else "ddp"))

    def walk(given: Mapping, known: Mapping, prefix: str) -> list[str]:
        found = [
            f"{prefix}{k}: unknown field{closest(k, list(known))}" for k in given if k not in known
        ]
        for key, default in known.items():
            label = f"{prefix}{key}"
            if key not in given:
                found.append(f"{label} is missing: start from experiments.config.base")
            elif isinstance(default, dict):
                if not isinstance(given[key], Mapping):
                    found.append(
                        f"{label}={given[key]!r}: must be a section of fields; set {label}.FIELD"
                    )
                elif label != "method":  # its fields are the factory's, see `make_method`
                    found += walk(given[key], default, f"{label}.")
            elif not _same_type(given[key], default, optional=label == "inner.clip_norm"):
                kind = type(default).__name__
                found.append(f"{label}={given[key]!r}: must be of type {kind}, like {default!r}")
        return found

    return walk(fields, reference, "")


def _same_type(value: Any, default: Any, optional: bool) -> bool:
    if default is None or (optional and value is None):
        return True
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, float | int)
    return isinstance(value, type(default))


def number_problems(fields: Mapping[str, Any]) -> list[str]:
    """Counts, chances, seeds and patterns that are out of range."""
    given = dotted(dict(fields))
    found = [f"{name}={given[name]}: at least 1 is needed" for name in _FROM_1 if given[name] < 1]
    found += [
        f"{name}={given[name]}: give 0 (off) or a number of inner steps"
        for name in ("eval.every", "checkpoint.every")
        if given[name] < 0
    ]
    if not 0 < fields["participation"] <= 1:
        found.append(f"participation={fields['participation']}: give a chance in (0, 1]")
    if not 0 <= fields["seed"] < 1 << 31:
        found.append(f"seed={fields['seed']}: give a whole number in [0, 2**31)")
    for pattern in fields["frozen"]:
        if not isinstance(pattern, str):
            found.append(f"frozen: {pattern!r} is no text: give regular expressions of names")
            continue
        try:
            re.compile(pattern)
        except re.error as error:
            found.append(f"frozen: {pattern!r} is no regular expression ({error})")
    return found


def count_steps(fields: Mapping[str, Any]) -> tuple[int, list[str]]:
    """(inner steps of the run, given or from `tokens`; problems)."""
    steps, tokens = fields["steps"], fields["tokens"]
    if tokens is None:
        fix = "give steps, or tokens of all regions together"
        return steps, [] if steps >= 1 else [f"steps={steps}: {fix}"]
    if steps:
        fix = "give one (--config.tokens=None for steps, --config.steps=0 for tokens)"
        return steps, [f"steps={steps} and tokens={tokens}: {fix}"]
    per_step = fields["regions"] * fields["batch"] * fields["data"]["seq_len"]
    if tokens < 1:
        return 0, [f"tokens={tokens}: at least 1 is needed; or give steps"]
    return -(-tokens // max(per_step, 1)), []


def fit_warm_up(config: Any, overrides: Sequence[tuple[str, str]]) -> str:
    """Shorten a warm-up that the run is too short for, where nobody asked for it.

    A tenth of the steps takes the place of the config file's own, in `config`. One that an override
    names stays, and is refused where it does not fit.

    Returns:
      A sentence that says so; empty where nothing has changed.
    """
    given = {name for name, _ in overrides}
    if "inner" not in config or "inner.warmup_steps" in given or not given & {"steps", "tokens"}:
        return ""
    steps, problems = count_steps(plain(config))
    warm_up = config.inner.warmup_steps
    if problems or steps < 1 or warm_up < steps:
        return ""
    config.inner.warmup_steps = steps // 10
    return (
        f"warm-up: {steps // 10} of {steps} steps; the config's {warm_up} do not fit "
        "(--config.inner.warmup_steps=N sets it)"
    )


def data_config(fields: Mapping[str, Any]) -> tuple[DataConfig, list[str]]:
    """(the data's config, problems); checks that the corpus can be opened."""
    data = DataConfig(**fields["data"], seed=fields["seed"], regions=fields["regions"])
    found = [line for line in data.violations() if not line.startswith(("regions=", "seed="))]
    source = CorpusSource(data.corpus, data.text_column, data.topic_column, data.split)
    found += open_corpus(source)[1]
    return data, [f"data.{line}" for line in found]


def model_config(fields: Mapping[str, Any]) -> tuple[TransformerConfig | None, bool, list[str]]:
    """(the model's config or None, whether its vocabulary size is known, problems)."""
    changes = {k: v for k, v in fields["model"].items() if v is not None}
    name, start = changes.pop("preset"), changes.pop("init_from", None)
    if start is not None and not Path(start, "checkpoints").is_dir():
        described = Path(start, "config.json")
        if not described.is_file():
            fix = "give a folder with config.json and *.safetensors, or another run's workdir"
            return None, True, [f"model.init_from={start!r}: {fix}"]
        try:
            there = read_json(described, "model.init_from", "give what Hugging Face writes")
        except RefusedError as error:
            return None, True, [f"model.init_from: {line}" for line in error.problems]
        if not isinstance(there, dict):
            return None, True, [f"model.init_from: {described} describes no model"]
        model, found = problems_of(lambda: config_from_llama(there, **changes), "model.init_from: ")
        return model, True, found
    settled = "vocab_size" in changes
    changes.setdefault("vocab_size", PROVISIONAL_VOCABULARY)
    model, found = problems_of(lambda: preset(name, **changes), "model: ")
    return model, settled, found


def region_weights(fields: Mapping[str, Any]) -> tuple[str | tuple[float, ...], list[str]]:
    """(`equal`, `tokens` or a number a region; problems)."""
    text = fields["weights"]
    if text in ("equal", "tokens"):
        return text, []
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        return text, [f"weights={text!r}: use equal, tokens, or one number per region: 0.5,0.2,0.3"]
    return numbers, []


def make_mesh_of(
    fields: Mapping[str, Any], target: Target | None = None
) -> tuple[jax.sharding.Mesh | None, list[str]]:
    """(the mesh, or None if it cannot be made; problems); sizes of 0 are chosen to fit.

    Args:
      target: accelerators whose devices the mesh is made of; None = this machine's.
    """
    shape, regions = dict(fields["mesh"]), fields["regions"]
    devices = jax.device_count() if target is None else target.size
    negative = [f"mesh.{k}={v}: give 0 (automatic) or a number" for k, v in shape.items() if v < 0]
    if negative or regions < 1:
        return None, negative
    regions = 1 if is_separate_job(fields) else regions
    stage, tensor = max(shape["stage"], 1), max(shape["tensor"], 1)
    if target is None and not shape["region"] and not shape["fsdp"] and stage * tensor == 1:
        return default_mesh(regions), []
    room = devices // (stage * tensor)
    region = shape["region"] or math.gcd(regions, max(room // max(shape["fsdp"], 1), 1))
    fsdp = shape["fsdp"] or max(room // region, 1)
    if target is not None:
        return problems_of(lambda: target.mesh(region, stage, fsdp, tensor), "mesh: ")
    mesh, found = problems_of(lambda: make_mesh(region, stage, fsdp, tensor), "mesh: ")
    each = math.ceil(region * stage * fsdp * tensor / jax.process_count())
    fix = f"XLA_FLAGS={FLAG}={each} cuts a processor into as many"
    if jax.process_count() > 1:
        fix += f", in each of {jax.process_count()} processes"
    return mesh, [f"{line}; use a smaller mesh (mesh.stage=1), or {fix}" for line in found]


def batch_problems(fields: Mapping[str, Any], mesh: jax.sharding.Mesh | None) -> list[str]:
    """Batches that do not divide."""
    batch, accumulate, found = fields["batch"], fields["accumulate"], []
    if mesh is None or min(batch, accumulate) < 1:
        return found
    fsdp = mesh.shape["fsdp"]
    if batch % accumulate:
        found.append(
            f"batch={batch} does not divide into accumulate={accumulate} microbatches: use a "
            "multiple"
        )
    elif batch // accumulate % fsdp:
        found.append(
            f"batch={batch} in {accumulate} microbatch(es) does not divide over fsdp={fsdp} "
            f"devices of a region: use a multiple of {accumulate * fsdp}, or --config.mesh.fsdp=1"
        )
    return found


def microbatch_count(fields: Mapping[str, Any], fsdp: int) -> int:
    """Microbatches in flight through the stages of a region."""
    part = fields["batch"] // max(fields["accumulate"], 1)
    return fields["microbatches"] or max(part // fsdp, 1)


def stage_problems(
    fields: Mapping[str, Any], mesh: jax.sharding.Mesh | None, model: TransformerConfig | None
) -> list[str]:
    """Pipeline stages that do not fit the model, and microbatches that do not fit the batch."""
    given = fields["microbatches"]
    if given < 0:
        return [f"microbatches={given}: give 0 (automatic) or a number"]
    if fields["mesh"]["stage"] < 2:
        fix = "they are for pipeline stages; use accumulate, or mesh.stage above 1"
        found = [f"microbatches={given}: {fix}"] * (given > 0)
        fix = "needs pipeline stages: set mesh.stage above 1"
        found += [f"pipeline_schedule {fix}"] * (fields["pipeline_schedule"] != "gpipe")
        return found + [f"random_routing {fix}"] * fields["random_routing"]
    if mesh is None:
        return []
    fsdp, part = mesh.shape["fsdp"], fields["batch"] // max(fields["accumulate"], 1)
    count = microbatch_count(fields, fsdp)
    found = [
        f"pipeline_schedule: {line}"
        for line in schedule_problems(fields["pipeline_schedule"], fields["random_routing"])
    ]
    if model is not None:
        problems = pipeline_problems(model, mesh.shape["stage"], count)
        found += [f"mesh.stage: {line}" for line in problems]
    if part % (count * fsdp):
        found.append(
            f"batch={fields['batch']} in accumulate={fields['accumulate']} does not divide into "
            f"microbatches={count} over fsdp={fsdp} devices: use a multiple of "
            f"{count * fsdp * fields['accumulate']}"
        )
    return found


def memory_bytes(fields: Mapping[str, Any]) -> int | None:
    """Bytes of a device that a step may use; None where none are given, or what is no number."""
    given = fields["adaptive"]["memory_gb"]
    return int(given * 1e9) if is_number(given) and 1e-9 <= given <= 1e9 else None


def adaptive_problems(fields: Mapping[str, Any], method: Method | None) -> list[str]:
    """Settings of growing batches that have no effect, or that cannot work."""
    if method is None:
        return []
    given = fields["adaptive"]
    if not method.adapts:
        unset = plain(base("ddp"))["adaptive"]
        unused = [k for k, v in given.items() if v != unset[k]]
        return [
            f"adaptive.{key}={given[key]!r} has no effect: {method.name} has a fixed batch; leave "
            "it out, or give method.inner_batching"
            for key in unused
        ]
    found = []
    if given["memory_gb"] is not None and memory_bytes(fields) is None:
        found.append(f"adaptive.memory_gb={given['memory_gb']}: give gigabytes of a device, as 16")
    if fields["mesh"]["stage"] > 1:
        fix = "stages need microbatches of one size, and these grow; use mesh.stage=1"
        found.append(f"mesh.stage={fields['mesh']['stage']}: {fix}")
    return found
