"""Load the anchor of a run from one of its checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import ml_collections

import lowcomm_jax as lc
from experiments.cli import RefusedError, problems_of, refuse_any
from experiments.train.assemble import Run, assemble
from experiments.train.job import abstract_params
from experiments.train.resolve import resolve
from experiments.workdir import CHECKPOINTS, CONFIG, learnt, read_config
from lowcomm_jax.checkpoint import Checkpoints, DamagedError, Restored


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run's parts, its anchor (nested dict of float32 arrays) and the step it was saved at.

    The anchor is that of the model in one piece, `run.whole`.
    """

    run: Run
    params: Any
    step: int


def load_trained(workdir: Path, step: int | None = None) -> Trained:
    """Load the anchor of a run from the checkpoint of a step; None = the newest usable one.

    Raises:
      RefusedError: the folder holds no run, or a run without a checkpoint (of that step) that can
        be read.
    """
    title = f"--workdir={workdir}"
    if not (workdir / CONFIG).is_file():
        raise RefusedError([f"no run lies there ({CONFIG} is missing)"], title)
    config = read_config(workdir)
    run = assemble(resolve(ml_collections.ConfigDict(config), workdir))
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
