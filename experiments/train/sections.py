"""What sections of a training config describe: data, mesh, weights, and how many steps.

What cannot be made is None, beside a list of its problems, with their fixes. Fields that do not go
together stand in `experiments.refusals`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from experiments.cli import closest, problems_of
from experiments.config import base, plain
from experiments.regions.jobs import is_separate_job
from experiments.train.devices import FLAG
from experiments.train.model import is_own
from lowcomm_jax import make_mesh, methods
from lowcomm_jax.aot import Target
from lowcomm_jax.data import DataConfig, open_corpus
from lowcomm_jax.mesh.regions import default_mesh


def shape_problems(fields: Mapping[str, Any]) -> list[str]:
    """Fields that are missing, unknown, or of another type than the defaults'."""
    name = fields.get("method", {}).get("name") if isinstance(fields.get("method"), dict) else None
    reference = plain(base(name if name in methods.NAMES else "ddp"))

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
                elif label != "method" and not (label == "model" and is_own(given[key])):
                    # Their fields are the factory's, see `make_method` and `model.described`.
                    found += walk(given[key], default, f"{label}.")
            elif not _same_type(given[key], default, optional=label == "inner.clip_norm"):
                kind = type(default).__name__
                found.append(f"{label}={given[key]!r}: must be of type {kind}, like {default!r}")
            elif isinstance(given[key], str) and not _is_utf8(given[key]):
                found.append(f"{label}={given[key]!r} is no UTF-8 text, as records need: rename it")
        return found

    return walk(fields, reference, "")


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

    Returns:
      A sentence that says so; empty where nothing has changed.
    """
    given = {name for name, _ in overrides}
    if "inner" not in config or "inner.warmup_steps" in given or not given & {"steps", "tokens"}:
        return ""
    steps, warm_up = steps_of(plain(config)), config.inner.warmup_steps
    if steps < 1 or warm_up < steps:
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
    found += open_corpus(data)[1]
    return data, [f"data.{line}" for line in found]


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


def microbatch_count(fields: Mapping[str, Any], fsdp: int) -> int:
    """Microbatches in flight through the stages of a region."""
    part = fields["batch"] // max(fields["accumulate"], 1)
    return fields["microbatches"] or max(part // fsdp, 1)
