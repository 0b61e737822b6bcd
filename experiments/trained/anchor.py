"""Load the anchor of a run from one of its checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import ml_collections

import lowcomm_jax as lc
from experiments.cli import RefusedError, problems_of, refuse_any
from experiments.refusals import READ
from experiments.train.assemble import Run, assemble
from experiments.train.model import is_own
from experiments.train.resolve import resolve
from experiments.workdir import CHECKPOINTS, CONFIG, learnt, read_config
from lowcomm_jax.checkpoint import Checkpoints, DamagedError, Restored
from lowcomm_jax.models.protocol import abstract_params


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run's parts, its anchor (nested dict of float32 arrays) and the step it was saved at.

    The anchor is that of the model in one piece, `run.whole`.
    """

    run: Run
    params: Any
    step: int


def load_trained(workdir: Path, step: int | None = None, command: str | None = None) -> Trained:
    """Load the anchor of a run from a checkpoint.

    Args:
      step: of the checkpoint; None = the newest usable one.
      command: what needs the built-in decoder, by its name; None = any model will do.

    Raises:
      RefusedError: the folder holds no run, or a run without a checkpoint (of that step) that can
        be read, or one of a model of one's own where a decoder is needed.
    """
    title = f"--workdir={workdir}"
    if not (workdir / CONFIG).is_file():
        raise RefusedError([f"no run lies there ({CONFIG} is missing)"], title)
    config = read_config(workdir)
    if command is not None and is_own(config["model"]):
        named = f"the run trained {config['model']['name']}, {command} needs the built-in decoder"
        fix = "experiments.trained.anchor.load_trained gives a program of yours its parameters"
        raise RefusedError([f"{named}: {fix}"], title)
    run = assemble(resolve(ml_collections.ConfigDict(config), workdir, rows=READ))
    with Checkpoints(workdir / CHECKPOINTS) as checkpoints:
        restored, problems = problems_of(lambda: _restore(checkpoints, run, step))
    refuse_any(problems, title)
    if restored is None:
        raise RefusedError(["the run has no checkpoint yet: let it train longer"], title)
    params = run.in_one_piece(lc.global_params(restored.state))
    return Trained(run, params, restored.step)


def _restore(checkpoints: Checkpoints, run: Run, step: int | None) -> Restored | None:
    params, config = abstract_params(run.model), learnt(run.job.config)
    try:
        return checkpoints.restore(run.engine, params, step=step, config=config)
    except DamagedError as error:
        raise ValueError(str(error)) from error
