"""Write the anchor of a run as a LLaMA-shaped safetensors checkpoint.

    python -m experiments export --workdir=runs/a --output=exported

The folder holds config.json and model.safetensors, readable by transformers and by
--config.model.init_from.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from experiments.cli import Flags, RefusedError, parse_flags, problems_of, show_help
from experiments.trained.anchor import load_trained
from lowcomm_jax.models.weights import save_llama


def main(argv: Sequence[str]) -> int:
    """Export as the command line says; returns the exit code."""
    options = Flags()
    options.text("workdir", None, "folder of the run")
    options.text("output", None, "folder to write")
    options.text("dtype", "float32", "of the stored tensors, or bfloat16")
    values = options.values
    rest = parse_flags("export", argv, values)
    if values.help:
        show_help(values, __doc__)
        return 0
    problems = [f"unexpected argument {argument!r}" for argument in rest]
    problems += [f"--{name} is missing" for name in ("workdir", "output") if not values[name].value]
    if problems:
        raise RefusedError(problems, "export")
    trained = load_trained(Path(values.workdir))
    params = jax.tree.map(np.asarray, trained.params)
    _, problems = problems_of(
        lambda: save_llama(values.output, trained.run.whole, params, values.dtype)
    )
    if problems:
        raise RefusedError(problems, "export")
    print(f"step {trained.step} written to {values.output}")
    return 0
