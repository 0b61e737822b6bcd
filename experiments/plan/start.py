"""The training config of a planned method, as fields and as a file that `train` starts from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.plan.config import PlanRequest
from lowcomm_jax.planner.methods import COSINE, LOW_RANK, ONE_PERIOD, SPARSE, PlanMethod
from lowcomm_jax.planner.plan import PlanRow

_BYTES = 258  # entries of the smallest tokenizer: a smaller vocabulary takes the tokenizer's size
# Presets of the planner: the config in configs/, fields of its method section and the attribute of
# `PlanMethod` they are, and the codec that is its own (named otherwise, or not at all).
_STARTS: dict[str, tuple[str, dict[str, str], str | None]] = {
    "allreduce": ("ddp", {}, None),
    "local_sgd": ("local_sgd", {"period": "period"}, None),
    "diloco": ("diloco", {"period": "period"}, None),
    "streaming_diloco": (
        "streaming_diloco",
        {"period": "period", "fragments": "fragments", "overlap": "tau_steps"},
        None,
    ),
    "eager_diloco": ("eager_diloco", {"period": "period"}, None),
    "cocodc": (
        "cocodc",
        {"period": "period", "fragments": "fragments", "overlap": "tau_steps"},
        None,
    ),
    "decoupled_diloco": (
        "decoupled_jobs",
        {"period": "period", "fragments": "fragments", "overlap": "tau_steps"},
        None,
    ),
    "dilocox": ("dilocox", {"period": "period", "rank": "rank"}, LOW_RANK),
    "noloco": ("noloco", {"period": "period"}, None),
    "sparseloco": ("sparseloco", {"period": "period"}, SPARSE),
    "muloco": ("muloco", {"period": "period"}, None),
    "isoloco": ("isoloco", {"period": "period"}, None),
    "restarted_diloco": ("restarted_diloco", {"period": "period"}, None),
    "demo": ("demo", {}, COSINE),
    "decoupled_momentum": ("decoupled_momentum", {"period": "period"}, COSINE),
}


def train_fields(request: PlanRequest, row: PlanRow) -> tuple[dict[str, Any] | None, str]:
    """Dotted fields of a training config for a planned method.

    Returns:
      (fields that differ from those of the file that the field `config` names, ""), or (None, why
      there is no such config).
    """
    fields, work, method = request.fields, request.work, row.method
    preset = _preset_of(fields["methods"], method.name)
    if preset not in _STARTS:
        return None, f"{method.name} is no preset of the planner, so no config is known for it"
    name, own, codec = _STARTS[preset]
    problem = _unlike(method, preset, own)
    if problem:
        return None, problem
    from lowcomm_jax.models import PRESETS  # slow to import

    if request.model.name not in PRESETS:
        shown = request.model.name or "given by its sizes"
        return None, f"the model is {shown}: name a preset of lowcomm_jax.models"
    regions, seq_len = work.network.size, fields["seq_len"]
    batch = work.tokens_per_step / regions / seq_len
    if batch != int(batch):
        return None, f"tokens_per_step does not divide into {regions} regions and seq_len {seq_len}"
    found = {
        "config": name,
        "regions": regions,
        "batch": int(batch),
        "steps": 0,
        "tokens": int(work.tokens),
        "model.preset": request.model.name,
        "model.compute_dtype": "bfloat16",
        "model.remat": "full" if work.remat else "none",
        "data.seq_len": seq_len,
        **{f"mesh.{axis}": work.mesh.get(axis, 1) for axis in ("stage", "fsdp", "tensor")},
        **{f"method.{field}": getattr(method, attribute) for field, attribute in own.items()},
    }
    if work.model.vocab >= _BYTES:
        found["model.vocab_size"] = work.model.vocab  # else it would be the tokenizer's
    if isinstance(fields["network"], str):
        found["network"] = fields["network"]
    parts = found["batch"] * seq_len / max(1, fields["microbatch_tokens"]) / found["mesh.fsdp"]
    if fields["microbatch_tokens"] and work.mesh.get("stage", 1) == 1 and parts >= 1:
        found["accumulate"] = max(n for n in range(1, int(parts) + 1) if not found["batch"] % n)
    if codec is None:
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


def _unlike(method: PlanMethod, preset: str, own: Mapping[str, str]) -> str:
    """Why no config expresses a planned method; empty = one does."""
    codec = _STARTS[preset][2]
    if not isinstance(method.codec, str):
        return f"{method.name} is planned with {method.codec:g} bits, which is no codec"
    if codec is not None and method.codec != codec:
        return f"{preset} is planned with {method.codec}, its config has its own codec"
    late = preset in ("eager_diloco", "dilocox")
    if late and method.tau not in (ONE_PERIOD, method.period):
        return f"{preset} lands a period late, and is planned with tau = {method.tau}"
    if not late and "overlap" not in own and (method.tau_steps or method.fragments > 1):
        return f"{preset} has no fragments and no delay, and is planned with them"
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
    lines += [f"    config.{field} = {value!r}" for field, value in values.items()]
    path.write_text("\n".join([*lines, "    return config", ""]), encoding="utf-8")
