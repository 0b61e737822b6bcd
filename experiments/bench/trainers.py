"""Trainers stacked into one program against trainers one after the other, over whole rounds."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

import lowcomm_jax as lc
from experiments.bench.timing import interleave, ratio
from experiments.bench.work import EngineRow

TRAINERS, REGIONS, PERIOD = 4, 1, 30  # H and the trainers of configs/adloco.py
FORMS = {
    "by turns": {"stack_trainers": False},
    "stacked (map)": {"stack_trainers": True, "replicas": "map"},
    "stacked (vmap)": {"stack_trainers": True, "replicas": "vmap"},
}


def rows(work: Any, repeats: int) -> list[Any]:
    """Rows of the engine benchmark that concern trainers."""
    seconds = interleave({name: _rounds(work, **form) for name, form in FORMS.items()}, repeats)
    turns, *others = FORMS
    return [
        EngineRow(
            f"{TRAINERS} trainers, {name} / {turns}", ratio(seconds[turns], seconds[name]), "x"
        )
        for name in others
    ]


def _rounds(work: Any, **form):
    """A round of H steps on one sequence a trainer, and the exchanges after it."""
    method = lc.methods.adloco(PERIOD, TRAINERS, None, "fixed", start_batch=1)
    mesh = lc.make_mesh(devices=jax.devices()[:1])
    engine = lc.AdaptiveEngine(
        work.model.loss_fn, optax.adamw(3e-4), method, REGIONS, mesh=mesh, **form
    )
    holder = [engine.init(work.params)]
    drawn = np.random.default_rng(0).integers(
        0, work.model.config.vocab_size, (REGIONS, 1, work.context + 1), np.int32
    )

    def source(trainer: int, start: int, count: int) -> dict[str, np.ndarray]:
        del trainer, start
        return {"tokens": np.repeat(drawn, count, axis=1)}

    def run():
        holder[0], _ = engine.run(holder[0], source, rounds=1)
        return [(t.state.anchor, t.state.inner) for t in holder[0].trainers.values()]

    return run
