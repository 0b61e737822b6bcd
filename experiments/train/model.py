"""The model that a config's `model` section names: the built-in decoder, or `module:factory`.

Without a name the section describes the decoder: a preset or weights, and fields of
`TransformerConfig`. `--config.model=module:factory` puts the factory's section in its place:
`name`, `init_from`, and every keyword of the factory with its default. Both give a model that
follows `lowcomm_jax.models.Trainable`, and `build` makes it.

A factory is called several times, before any work and again once the tokenizer is known. Keywords
that it takes and that nobody gives come from the run: `vocab_size` (of the tokenizer) and
`seq_len`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from experiments.cli import RefusedError, model_section, named_function, problems_of
from experiments.config import plain
from experiments.shape import read_json
from experiments.train import parts
from experiments.train.parts import PartKind
from lowcomm_jax import models
from lowcomm_jax.models import Trainable, TransformerConfig, preset
from lowcomm_jax.models.config import ways as ways_of_decoder
from lowcomm_jax.models.protocol import abstract_params
from lowcomm_jax.models.weights import config_from_llama

PROVISIONAL_VOCABULARY = 320  # until the tokenizer is open: the least that one of ours has
MODEL = PartKind(
    "the model",
    {},
    (Trainable,),
    "a lowcomm_jax.models.Trainable: an object with the functions init and loss_fn",
    ("vocab_size", "seq_len"),
)


@dataclasses.dataclass(frozen=True)
class OwnModel:
    """A model of one's own: its factory and what that is given.

    Attributes:
      name: `module:factory`.
      settings: keywords of the factory, the run's own among them.
    """

    name: str
    settings: Mapping[str, Any]

    @property
    def vocab_size(self) -> int | None:
        """Entries of the vocabulary that the factory is given; None = it takes none."""
        return self.settings.get("vocab_size")


Described = TransformerConfig | OwnModel
"""A model that is described, and not built yet."""


def is_own(section: Mapping[str, Any]) -> bool:
    """Whether a `model` section names a factory."""
    return section.get("name") is not None


def described(fields: dict[str, Any]) -> tuple[Described | None, bool, list[str]]:
    """What the `model` section of a config describes.

    A section of a factory is filled up with the factory's defaults, in `fields`, so that the run's
    stored config holds them.

    Returns:
      (the description or None, whether its vocabulary is known without the tokenizer, problems).
    """
    if is_own(fields["model"]):
        return _own(fields)
    return _decoder(fields["model"])


def _own(fields: dict[str, Any]) -> tuple[OwnModel | None, bool, list[str]]:
    name = fields["model"]["name"]
    _, problems = problems_of(lambda: model_section(name))
    if problems:
        return None, True, problems
    factory = named_function(name, "model")
    takes = inspect.signature(factory).parameters
    unset = {k for k, p in takes.items() if p.default in (None, p.empty)} | {"init_from"}
    section = {k: v for k, v in fields["model"].items() if k != "name"}
    given = {k: v for k, v in section.items() if v is not None or k not in unset}
    start = given.pop("init_from", None)
    if start is not None and not Path(start, "checkpoints").is_dir():
        fix = "give the workdir of another run of this model"
        problems = [f"model.init_from={start!r}: {fix}"]
    run = {"vocab_size": PROVISIONAL_VOCABULARY, "seq_len": fields["data"]["seq_len"]}
    settings = {k: v for k, v in run.items() if k in takes}
    settings |= {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    problems += parts.setting_problems(factory, settings, "model", name)
    if problems:
        return None, True, problems
    fields["model"] = plain(model_section(name, **given)) | {"init_from": start}
    settled = "vocab_size" in given or "vocab_size" not in takes
    model, label = OwnModel(name, settings), f"model={name!r}"
    try:
        built, problems = parts.call(MODEL, factory, settings, "model", name)
    except Exception as error:  # whatever anybody's factory does
        return None, settled, [f"{label}: it raises {_reason(error)}; mend it there"]
    problems = problems or _misfits(built, label, fields)
    return (None if problems else model), settled, problems


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _misfits(model: Trainable, label: str, fields: Mapping[str, Any]) -> list[str]:
    """What is wrong with a model's functions, called on shapes alone."""
    wrong = [key for key in ("init", "loss_fn") if not callable(getattr(model, key))]
    if wrong:
        return [f"{label}: its {' and '.join(wrong)} must be a function: {MODEL.what}"]
    length = fields["data"]["seq_len"]
    batch = {
        "tokens": jax.ShapeDtypeStruct((1, length + 1), np.int32),
        "mask": jax.ShapeDtypeStruct((1, length), np.float32),
    }
    try:
        called = "init"
        params = abstract_params(model)
        called = "loss_fn"
        found = jax.eval_shape(model.loss_fn, params, batch, jax.random.key(0))
    except Exception as error:  # whatever anybody's model does
        return [f"{label}: {called} raises {_reason(error)}; mend it there"]
    if not jax.tree.leaves(params):
        return [f"{label}: init gives no parameters; return a pytree of arrays"]
    loss = found[0] if isinstance(found, tuple) and len(found) == 2 else found
    if getattr(loss, "shape", None) != () or not np.issubdtype(loss.dtype, np.floating):
        return [f"{label}: loss_fn must return a scalar loss, or (loss, aux); it returns {found}"]
    return _optional_misfits(model, label, params, batch["tokens"])


def _optional_misfits(
    model: Trainable, label: str, params: Any, tokens: jax.ShapeDtypeStruct
) -> list[str]:
    """What is wrong with the parts that a model may leave out.

    Args:
      params: shapes.
      tokens: of a batch of one sequence.
    """
    rows, length = tokens.shape[0], tokens.shape[1] - 1
    shorter = jax.ShapeDtypeStruct((rows, length), tokens.dtype)
    leaves = jax.tree.structure(params)

    def fits(specs: Any) -> bool:
        kinds = jax.tree.map(lambda _, spec: isinstance(spec, P), params, specs)
        return jax.tree.structure(kinds) == leaves and all(jax.tree.leaves(kinds))

    parts = {
        "specs": (
            lambda: fits(model.specs(params, {"fsdp": 1, "tensor": 1})),
            "give a PartitionSpec for each parameter, as the same tree",
        ),
        "flops_per_token": (lambda: model.flops_per_token(length) > 0, "give a number above 0"),
        "stacked": (
            lambda: all(isinstance(prefix, str) for prefix in model.stacked),
            "give path prefixes, a tuple of texts",
        ),
        "logits": (
            lambda: jax.eval_shape(model.logits, params, shorter).shape[:-1] == (rows, length),
            "give scores of every token, [B, T, V]",
        ),
    }
    found = []
    for part, (check, fix) in parts.items():
        try:
            reason = "" if not hasattr(model, part) or check() else "it gives something else"
        except Exception as error:  # whatever anybody's model does
            reason = f"it raises {_reason(error)}"
        found += [f"{label}: its {part}: {reason}; {fix}, or leave it out"] if reason else []
    return found


def _decoder(
    section: Mapping[str, Any],
) -> tuple[TransformerConfig | None, bool, list[str]]:
    changes = {k: v for k, v in section.items() if v is not None}
    name, start = changes.pop("preset"), changes.pop("init_from", None)
    if start is not None and not Path(start, "checkpoints").is_dir():
        config = Path(start, "config.json")
        if not config.is_file():
            fix = "give a folder with config.json and *.safetensors, or another run's workdir"
            return None, True, [f"model.init_from={start!r}: {fix}"]
        try:
            there = read_json(config, "model.init_from", "give what Hugging Face writes")
        except RefusedError as error:
            return None, True, [f"model.init_from: {line}" for line in error.problems]
        if not isinstance(there, dict):
            return None, True, [f"model.init_from: {config} describes no model"]
        model, found = problems_of(lambda: config_from_llama(there, **changes), "model.init_from: ")
        return model, True, found
    settled = "vocab_size" in changes
    changes.setdefault("vocab_size", PROVISIONAL_VOCABULARY)
    model, found = problems_of(lambda: preset(name, **changes), "model: ")
    return model, settled, found


def with_vocabulary(model: Described, size: int) -> Described:
    """The same model for a vocabulary of this size."""
    if isinstance(model, OwnModel):
        return OwnModel(model.name, {**model.settings, "vocab_size": size})
    return dataclasses.replace(model, vocab_size=size)


def ways(model: Described) -> list[Described]:
    """How the model can be computed, from the fastest to the smallest; one's own in one way."""
    return [model] if isinstance(model, OwnModel) else ways_of_decoder(model)


def build(model: Described, device: jax.Device | None = None) -> Trainable:
    """Make a described model.

    Args:
      device: that it will run on; None = the first of the default backend.
    """
    if isinstance(model, OwnModel):
        return named_function(model.name, "model")(**model.settings)
    return models.build(model, device)
