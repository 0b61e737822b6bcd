"""The weights a run starts from: random, a LLaMA-shaped checkpoint, or another run's anchor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from experiments.cli import RefusedError, made_or_refused
from experiments.train.assemble import Run
from experiments.train.job import abstract_params
from experiments.trained.anchor import load_trained
from lowcomm_jax.models.model import Model
from lowcomm_jax.models.weights import load_llama


def starting_params(run: Run) -> Any:
    """Parameters at step 0: random by the seed, or those that `model.init_from` names.

    Raises:
      RefusedError: the given weights do not fit the model.
    """
    start = run.job.config["model"]["init_from"]
    if start is None:
        return jax.jit(run.model.init)(jax.random.key(run.job.config["seed"]))
    if Path(start, "checkpoints").is_dir():
        return run.in_stages(_anchor_that_fits(run.whole, start))
    changes = {
        k: v
        for k, v in run.job.config["model"].items()
        if v is not None and k not in ("preset", "init_from")
    }
    changes["layer_loop"] = run.job.model.layer_loop
    loaded = made_or_refused(
        lambda: load_llama(start, **changes), "cannot start", "model.init_from: "
    )
    return run.in_stages(loaded[1])


def _anchor_that_fits(model: Model, workdir: str) -> Any:
    trained = load_trained(Path(workdir))
    wanted = jax.tree.map(lambda x: (x.shape, x.dtype), abstract_params(model))
    if jax.tree.map(lambda x: (x.shape, x.dtype), trained.params) != wanted:
        fix = "that run trained another model; give this run the same model settings"
        raise RefusedError([f"model.init_from={workdir!r}: {fix}"])
    return trained.params
