"""The training config of a planned method, as fields and as a file that `train` starts from."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.cli import has_config
from experiments.plan.config import PlanRequest
from experiments.train import parts
from lowcomm_jax.planner.methods import FACTORIES
from lowcomm_jax.planner.plan import PlanRow

_BYTES = 258  # entries of the smallest tokenizer: a smaller vocabulary takes the tokenizer's size
# That of its own name scripts speeds and an outage, which no plan has.
_UNSCRIPTED = {"decoupled_diloco": "decoupled_jobs"}


def train_fields(request: PlanRequest, row: PlanRow) -> tuple[dict[str, Any] | None, str]:
    """Dotted fields of a training config for a planned method.

    Returns:
      (fields that differ from those of the file that the field `config` names, or where there is
      none from those of every config, ""), or (None, why there is no such config).
    """
    fields, work, method = request.fields, request.work, row.method
    name = method.preset
    if name is None:
        return None, f"{method.name} is no preset of the planner, so no config is known for it"
    if ":" in name:
        return None, f"{name} is a method of your own: train it with a config of yours"
    regions, seq_len = work.network.size, fields["seq_len"]
    batch = work.tokens_per_step / regions / seq_len
    if batch != int(batch):
        whole = max(1, round(batch)) * regions * seq_len
        return None, (
            f"tokens_per_step does not divide into {regions} regions and seq_len {seq_len}: "
            f"give --config.tokens_per_step={whole}"
        )
    factory = FACTORIES[name].__name__
    takes = inspect.signature(FACTORIES[name]).parameters
    # A rule is a section in the method's own config: text does not take its place.
    rules = [key for key, x in method.settings.items() if isinstance(x, str)]
    rules = [key for key in rules if parts.is_rule(key, takes)]
    settings = {**method.settings, **{key: {"name": method.settings[key]} for key in rules}}
    if method.inner is not None and not has_config(_UNSCRIPTED.get(factory, factory)):
        return None, f"{name} has an inner optimizer of its own, and no config that names it"
    found = {
        "config": _UNSCRIPTED.get(factory, factory),
        "method.name": factory,
        "regions": regions,
        "batch": int(batch),
        "steps": 0,
        "tokens": int(work.tokens),
        "data.seq_len": seq_len,
        **{f"mesh.{axis}": work.mesh.get(axis, 1) for axis in ("stage", "fsdp", "tensor")},
        **{f"method.{keyword}": value for keyword, value in settings.items()},
    }
    if request.model.decoder is not None:
        found |= {
            "model.compute_dtype": "bfloat16",
            "model.remat": "full" if work.remat else "none",
        }
    found |= {f"model.{key}": value for key, value in request.model.section.items()}
    if "overlap" in method.settings:
        found["method.overlap"] = method.tau  # a number, where it was "auto"
    if work.model.vocab >= _BYTES:
        found["model.vocab_size"] = work.model.vocab  # else it would be the tokenizer's
    elif request.model.decoder is not None:
        found.pop("model.vocab_size", None)
    if isinstance(fields["network"], str):
        found["network"] = fields["network"]
    pieces = found["batch"] * seq_len / max(1, fields["microbatch_tokens"]) / found["mesh.fsdp"]
    if fields["microbatch_tokens"] and work.mesh.get("stage", 1) == 1 and pieces >= 1:
        found["accumulate"] = max(n for n in range(1, int(pieces) + 1) if not found["batch"] % n)
    if found.get("method.codec") == "fp32":
        found["method.codec"] = None
    return found, ""


def write_start(path: Path, fields: Mapping[str, Any], title: str) -> None:
    """Write a config file that `train` takes: the method's own config, if it has one, changed."""
    values = {field: value for field, value in fields.items() if field != "config"}
    imports, config = [f"from configs import {fields['config']} as method"], "method.get_config()"
    if not has_config(fields["config"]):
        imports = ["from experiments.config import base"]
        of_method = [field for field in values if field.startswith("method.")]
        knobs = {field.removeprefix("method."): values.pop(field) for field in of_method}
        config = f"base({knobs.pop('name')!r}, **{knobs!r})"
    body = [f"    config = {config}"]
    if model := values.pop("model.name", None):
        imports.append("from experiments.cli import model_section")
        body.append(f"    config.model = model_section({model!r})")
    body += [f"    config.{field} = {value!r}" for field, value in values.items()]
    head = [f'"""{title}: as it was planned."""', "", *imports, "", ""]
    told = ["def get_config():", '    """Give the config."""', *body, "    return config", ""]
    path.write_text("\n".join(head + told), encoding="utf-8")
