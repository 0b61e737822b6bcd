"""The description of every field in `train --help`, and the YAML of `--print-config`.

A field is described once, where its default stands: in a comment in `experiments/config.py`, or in
the docstring of the section's dataclass. This module reads it from there; a comment comes first.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from typing import Any

import yaml

from experiments import config as defaults
from experiments.config import plain
from experiments.train.job import Job
from lowcomm_jax.checkpoint.load import dotted
from lowcomm_jax.data import DataConfig
from lowcomm_jax.models import TransformerConfig
from lowcomm_jax.optimizers import InnerConfig

_SECTIONS = {"_adaptive_section": "adaptive.", "_model_section": "model.", "_data_section": "data."}
_DATACLASSES = {"inner.": InnerConfig, "model.": TransformerConfig, "data.": DataConfig}
_ASSIGNED = re.compile(r"\s+(?:config|fields)\.([\w.]+)(?:, \S+)? = .*?(?:  # (.*))?")
_DOCUMENTED = re.compile(r"\s+((?:\w+, )*\w+): (.*)")


def descriptions() -> dict[str, str]:
    """Dotted name -> description, for the fields that have one."""
    found: dict[str, str] = {}
    for prefix, kind in _DATACLASSES.items():
        fields = {field.name for field in dataclasses.fields(kind)}
        found |= {prefix + k: v for k, v in _documented(inspect.getdoc(kind), fields).items()}
    before: list[str] = []
    prefix = ""
    for line in inspect.getsource(defaults).splitlines():
        if line.startswith("def "):
            prefix = _SECTIONS.get(line[4 : line.index("(")], "")
        if line.lstrip().startswith("# "):
            before.append(line.strip()[2:])
            continue
        assigned = _ASSIGNED.fullmatch(line)
        if assigned and (before or assigned[2]):
            found[prefix + assigned[1]] = " ".join([*before, assigned[2] or ""]).strip()
        before = []
    return found


def _documented(text: str | None, names: set[str]) -> dict[str, str]:
    """The attributes that a docstring describes, `name, name: text` over one line or more."""
    found: dict[str, str] = {}
    now: list[str] = []
    for line in (text or "").splitlines():
        entry = _DOCUMENTED.fullmatch(line)
        if entry and set(entry[1].split(", ")) <= names:
            now = entry[1].split(", ")
            found |= dict.fromkeys(now, entry[2])
        elif line.startswith("    ") and now:
            found |= {name: f"{found[name]} {line.strip()}" for name in now}
        else:
            now = []
    return found


def listing(config: Any) -> str:
    """Every field of a config: its name, its value there, and what it is."""
    about, lines = descriptions(), ["Fields, with their values in this config:"]
    for name, value in dotted(plain(config)).items():
        shown = "unset" if value is None else repr(value) if isinstance(value, str) else str(value)
        lines.append(f"  --config.{name}={shown}")
        if name in about:
            lines += textwrap.wrap(
                about[name], 92, initial_indent=" " * 6, subsequent_indent=" " * 6
            )
    return "\n".join(lines)


def resolved(job: Job) -> str:
    """The config of a checked run, and what follows from it, as YAML."""
    model = {
        k: v
        for k, v in dataclasses.asdict(job.model).items()
        if job.vocab_settled or k != "vocab_size"
    }
    derived = {
        "workdir": str(job.workdir),
        "steps": job.steps,
        "tokens": job.steps * job.tokens_per_step,
        "tokens_per_step": job.tokens_per_step,
        "regions_here": job.here,
        "mesh": {name: int(size) for name, size in job.mesh.shape.items()},
        "model": model,
        "inner": dataclasses.asdict(job.inner),
    }
    text = {"config": job.config, "derived": derived}
    return yaml.safe_dump(_plain(text), sort_keys=False, default_flow_style=None, width=100)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)
