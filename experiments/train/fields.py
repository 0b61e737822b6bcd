"""The description of every field in `train --help`, and the YAML of `--print-config`.

A field of every config is described where its default stands: in the table of
`experiments/config.py`, or in the record that it belongs to (`lowcomm_jax.settings`). Fields of
`method`, and of a model of one's own, are keywords of factories. Docstrings of factories are read,
since nothing else describes the keywords of one's own.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection, Mapping
from typing import Any

import docstring_parser
import msgspec
import numpy as np
import yaml

from experiments.cli import problems_of
from experiments.config import FIELDS
from experiments.train import methods, parts
from experiments.train.job import Job
from experiments.train.model import MODEL, is_own
from lowcomm_jax.compression import registry
from lowcomm_jax.models import TransformerConfig

_AS_IN = re.compile(r"as in `(\w+)`\.")


def descriptions(method: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, str]:
    """Dotted name -> description, for the fields that have one.

    Args:
      method, model: these sections of the config.
    """
    found = {name: field.about for name, field in FIELDS.items()}
    found |= {f"method.{k}": v for k, v in method_descriptions(method).items()}
    if is_own(model):
        found = {name: text for name, text in found.items() if not name.startswith("model.")}
        found |= {f"model.{name}": text for name, text in _of_own_model(model).items()}
    return found


def _of_own_model(section: Mapping[str, Any]) -> dict[str, str]:
    """Descriptions of the settings of a model of one's own, by its factory's docstring."""
    factory, _ = problems_of(lambda: parts.find(MODEL, section["name"], "model"))
    found = {
        "name": f"The model: {MODEL.what}.",
        "init_from": "Starting weights: the workdir of another run of this model; None = random.",
        "vocab_size": "Entries of the vocabulary. Unset = the tokenizer's.",
        "seq_len": "Tokens of a sequence. Unset = data.seq_len.",
    }
    found |= _documented(factory, section)
    return {name: text for name, text in found.items() if name in section}


def method_descriptions(method: Mapping[str, Any]) -> dict[str, str]:
    """Descriptions of a method section, by the names that the fields have inside it.

    A part that is not a keyword of the method's factory is described by its row of `parts.PARTS`.

    Args:
      method: a section that `make_method` takes.
    """
    known = f"one of {', '.join(parts.METHOD.known)}; or module:function, a factory of your own."
    found = {"name": f"The method: {known}"}
    factory, _ = problems_of(lambda: methods.find(method.get("name")))  # `train` reports problems
    for key, text in _documented(factory, method).items():
        same = _AS_IN.fullmatch(text)  # a keyword that another method's factory describes
        found[key] = _documented(methods.find(same[1]), [key])[key] if same else text
    for key, part in parts.PARTS.items():
        about = found.get(key, f"{part.about}; None = the method's own.")
        found[key] = f"{about} By name: {', '.join(part.known)}; or module:function."
    for key, section in method.items():
        if isinstance(section, Mapping):
            if "name" in section and key in found:
                found[f"{key}.name"] = found.pop(key)
            inside = _of_part(key, section)
            found |= {f"{key}.{name}": text for name, text in inside.items()}
    return found


def _of_part(key: str, section: Mapping[str, Any]) -> dict[str, str]:
    """Descriptions of the settings of a keyword that has a section of its own."""
    maker = parts.takes_settings(key, section)
    maker = maker if maker is None or callable(maker) else type(maker)
    found = _documented(maker, section)
    if parts.part_of(key) is parts.PARTS["codec"]:
        found |= _documented(registry.make, section)
    return found


def _documented(maker: Any, names: Collection[str]) -> dict[str, str]:
    """What the docstring of a function says of these keywords; an entry may name several.

    Args:
      maker: of a class, what it extends counts, too; None = not known.
    """
    maker = maker.func if isinstance(maker, functools.partial) else maker
    described = reversed(maker.__mro__) if isinstance(maker, type) else (maker,)
    found: dict[str, str] = {}
    for each in described if maker is not None else ():
        for entry in _entries(each.__doc__ or ""):
            text = " ".join((entry.description or "").split())
            found |= {name: text for name in entry.arg_name.split(", ") if name in names}
    return found


def _entries(docstring: str) -> list[docstring_parser.DocstringParam]:
    """What a docstring says of arguments; nothing where one of them is written in no known way."""
    try:
        return docstring_parser.parse(docstring).params
    except (docstring_parser.ParseError, IndexError):
        return []


def _as_text_or_number(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)


def resolved(job: Job) -> str:
    """The config of a checked run, and what follows from it, as YAML."""
    decoder = isinstance(job.model, TransformerConfig)
    model = dataclasses.asdict(job.model) if decoder else dict(job.model.settings)
    if not job.vocab_settled:
        del model["vocab_size"]
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
    plain = msgspec.to_builtins(text, enc_hook=_as_text_or_number)
    return yaml.safe_dump(plain, sort_keys=False, default_flow_style=None, width=100)
