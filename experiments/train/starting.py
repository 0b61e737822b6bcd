"""The weights a run starts from: random, a LLaMA-shaped checkpoint, or another run's anchor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from experiments.cli import RefusedError, made_or_refused
from experiments.train.assemble import Run
from experiments.trained.anchor import load_trained
from lowcomm_jax.data import Tokenizer
from lowcomm_jax.models import TransformerConfig
from lowcomm_jax.models.protocol import abstract_params
from lowcomm_jax.models.weights import load_llama, stack_layers, unstack_layers


def starting_params(run: Run) -> Any:
    """Parameters at step 0: random by the seed, or those that `model.init_from` names.

    Raises:
      RefusedError: the given weights do not fit the model.
    """
    start = run.job.config["model"]["init_from"]
    if start is None:
        return jax.jit(run.model.init)(jax.random.key(run.job.config["seed"]))
    if Path(start, "checkpoints").is_dir():
        return run.in_stages(_anchor_that_fits(run, start))
    changes = {
        k: v
        for k, v in run.job.config["model"].items()
        if v is not None and k not in ("name", "preset", "init_from")
    }
    changes["layer_loop"] = run.job.model.layer_loop
    loaded = made_or_refused(
        lambda: load_llama(start, **changes), "cannot start", "model.init_from: "
    )
    return run.in_stages(loaded[1])


# Fields of a model that change what its weights mean, and not their shapes.
_MEANING = ("heads", "kv_heads", "head_dim", "mlp")


def _anchor_that_fits(run: Run, workdir: str) -> Any:
    trained = load_trained(Path(workdir))
    params, there, here = trained.params, trained.run.way.model, run.way.model
    if isinstance(there, TransformerConfig) and isinstance(here, TransformerConfig):
        if there.layer_loop != here.layer_loop:
            params = (stack_layers if here.layer_loop == "scan" else unstack_layers)(params)
        same = all(getattr(there, field) == getattr(here, field) for field in _MEANING)
    else:
        sections = (dict(one.job.config["model"], init_from=None) for one in (trained.run, run))
        same = next(sections) == next(sections)
    wanted = jax.tree.map(lambda x: (x.shape, x.dtype), abstract_params(run.whole))
    same &= jax.tree.map(lambda x: (x.shape, x.dtype), params) == wanted
    problems = []
    if not same:
        problems.append("that run trained another model; give this run the same model settings")
    if not _same_tokens(trained.run.tokenizer, run.tokenizer):
        problems.append(
            "that run's tokenizer has other tokens (bpe: is trained on the corpus); `export` it, "
            "and use --config.data.tokenizer=file:FOLDER/tokenizer.json"
        )
    if problems:
        raise RefusedError([f"model.init_from={workdir!r}: {line}" for line in problems])
    return params


def _same_tokens(a: Tokenizer, b: Tokenizer) -> bool:
    """Whether the same numbers mean the same texts."""
    if a.digest == b.digest:
        return True
    vocabs = [one.backend.get_vocab(with_added_tokens=True) for one in (a, b)]
    return a.eos_id == b.eos_id and vocabs[0] == vocabs[1]
