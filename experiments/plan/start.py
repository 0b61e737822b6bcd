"""The training config of a planned method, as fields and as a file that `train` starts from."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.plan.config import PlanRequest
from lowcomm_jax.planner.methods import FACTORIES, ONE_PERIOD, PUBLISHED, PlanMethod, planned
from lowcomm_jax.planner.plan import PlanRow

_BYTES = 258  # entries of the smallest tokenizer: a smaller vocabulary takes the tokenizer's size
# Keywords of methods' factories, and the attribute of `PlanMethod` that each is.
_KEYWORDS = {"period": "period", "fragments": "fragments", "overlap": "tau_steps", "rank": "rank"}
_NO_PERIOD = ("period", None)  # by default: no main exchange
# Others have a config of their own name.
_CONFIGS = {"allreduce": "ddp", "decoupled_diloco": "decoupled_jobs"}


def train_fields(request: PlanRequest, row: PlanRow) -> tuple[dict[str, Any] | None, str]:
    """Dotted fields of a training config for a planned method.

    Returns:
      (fields that differ from those of the file that the field `config` names, ""), or (None, why
      there is no such config).
    """
    fields, work, method = request.fields, request.work, row.method
    name = _preset_of(fields["methods"], method.name)
    if name not in FACTORIES:
        return None, f"{method.name} is no preset of the planner, so no config is known for it"
    problem = _unlike(method, name)
    if problem:
        return None, problem
    from lowcomm_jax.models import PRESETS  # slow to import

    own = request.model.settings is not None
    if not own and request.model.name not in PRESETS:
        shown = request.model.name or "given by its sizes"
        return None, f"the model is {shown}: name a preset of lowcomm_jax.models"
    regions, seq_len = work.network.size, fields["seq_len"]
    batch = work.tokens_per_step / regions / seq_len
    if batch != int(batch):
        whole = max(1, round(batch)) * regions * seq_len
        return None, (
            f"tokens_per_step does not divide into {regions} regions and seq_len {seq_len}: "
            f"give --config.tokens_per_step={whole}"
        )
    found = {
        "config": _CONFIGS.get(name, name),
        "regions": regions,
        "batch": int(batch),
        "steps": 0,
        "tokens": int(work.tokens),
        "data.seq_len": seq_len,
        **{f"mesh.{axis}": work.mesh.get(axis, 1) for axis in ("stage", "fsdp", "tensor")},
        **{f"method.{field}": getattr(method, at) for field, at in _own_fields(name).items()},
        **_alike(name, regions),
    }
    if own:
        found |= {"model.name": request.model.name}
        found |= {f"model.{key}": value for key, value in request.model.settings.items()}
    else:
        found |= {"model.preset": request.model.name, "model.compute_dtype": "bfloat16"}
        found["model.remat"] = "full" if work.remat else "none"
    if work.model.vocab >= _BYTES:
        found["model.vocab_size"] = work.model.vocab  # else it would be the tokenizer's
    if isinstance(fields["network"], str):
        found["network"] = fields["network"]
    parts = found["batch"] * seq_len / max(1, fields["microbatch_tokens"]) / found["mesh.fsdp"]
    if fields["microbatch_tokens"] and work.mesh.get("stage", 1) == 1 and parts >= 1:
        found["accumulate"] = max(n for n in range(1, int(parts) + 1) if not found["batch"] % n)
    if _own_codec(name) is None and "codec" in inspect.signature(FACTORIES[name]).parameters:
        found["method.codec"] = None if method.codec == "fp32" else method.codec
    return found, ""


def _preset_of(spec: Any, name: str) -> str | None:
    rows = spec.values() if isinstance(spec, Mapping) else spec
    names = list(spec) if isinstance(spec, Mapping) else [None] * len(rows)
    for given, row in zip(names, rows):
        entry = {"preset": row} if isinstance(row, str) else dict(row)
        preset = entry.get("preset")
        if name in (given, entry.get("name", preset)):
            return preset
    return None


def _alike(name: str, regions: int) -> dict[str, Any]:
    """Regions that are planned as equal, where a method asks for their speeds and groups."""
    values = {"speeds": (1.0,) * regions, "groups": tuple((region,) for region in range(regions))}
    takes = inspect.signature(FACTORIES[name]).parameters
    asked = (k for k, v in takes.items() if v.default is inspect.Parameter.empty)
    return {f"method.{key}": values[key] for key in asked if key in values}


def _own_fields(name: str) -> dict[str, str]:
    """Fields of a config's method section that the plan decides, and the attributes they are."""
    takes = inspect.signature(FACTORIES[name]).parameters
    return {
        k: v for k, v in _KEYWORDS.items() if k in takes and (k, takes[k].default) != _NO_PERIOD
    }


def _own_codec(name: str) -> str | float | None:
    """What a method's own codec is to a plan; None = dense, or named in the method section."""
    codec = planned(name).codec
    return None if codec == "fp32" or "codec" in PUBLISHED.get(name, {}) else codec


def _unlike(method: PlanMethod, name: str) -> str:
    """Why no config expresses a planned method; empty = one does."""
    codec, own = _own_codec(name), _own_fields(name)
    if codec is not None and method.codec != codec:
        return f"{name} is planned with {method.codec}, its config has its own codec"
    if codec is None and not isinstance(method.codec, str):
        return f"{method.name} is planned with {method.codec:g} bits, which is no codec"
    late = planned(name).tau == ONE_PERIOD
    if late and method.tau not in (ONE_PERIOD, method.period):
        return f"{name} lands a period late, and is planned with tau = {method.tau}"
    if not late and "overlap" not in own and (method.tau_steps or method.fragments > 1):
        return f"{name} has no fragments and no delay, and is planned with them"
    return ""


def write_start(path: Path, fields: Mapping[str, Any], title: str) -> None:
    """Write a config file that `train` takes."""
    lines = [
        f'"""{title}: as it was planned."""',
        "",
        f"from configs import {fields['config']} as method",
        "",
        "",
        "def get_config():",
        '    """Give the config."""',
        "    config = method.get_config()",
    ]
    values = {field: value for field, value in fields.items() if field != "config"}
    if name := values.pop("model.name", None):
        lines[2] += "\nfrom experiments.cli import model_section"
        lines.append(f"    config.model = model_section({name!r})")
    lines += [f"    config.{field} = {value!r}" for field, value in values.items()]
    path.write_text("\n".join([*lines, "    return config", ""]), encoding="utf-8")
