"""Print text from a trained run.

    python -m experiments sample --workdir=runs/a --prompt="def "

`--step` takes the checkpoint of that step instead of the newest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from experiments.cli import Flags, made_or_refused
from experiments.refusals import checked_flags
from experiments.train import compile_cache
from experiments.trained.anchor import Trained, load_trained


def main(argv: Sequence[str]) -> int:
    """Sample as the command line says; returns the exit code."""
    options = Flags()
    options.text("workdir", None, "folder of the run")
    options.text("prompt", "def ", "text to continue")
    options.whole("step", None, "step of the checkpoint (default: the newest)")
    options.whole("length", None, "tokens to add (default: up to the trained length)")
    options.real("temperature", 0.8, "of the draws; 0 takes the likeliest token")
    options.whole("top_k", None, "draw among this number of likeliest tokens only")
    options.whole("count", 1, "how many texts")
    options.whole("seed", 0, "of the draws")
    values = options.values
    checked_flags("sample", argv, values, __doc__)
    compile_cache.enable(None)
    trained = load_trained(Path(values.workdir), values.step, "sample")
    how = {name: getattr(values, name) for name in ("length", "temperature", "top_k")}
    for i in range(values.count):
        if i:
            print("-" * 20)
        print(sample(trained, values.prompt, seed=values.seed + i, **how))
    return 0


def sample(
    trained: Trained,
    prompt: str,
    *,
    length: int | None = None,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> str:
    """Continue a prompt; returns it with its continuation, up to the end of the document.

    Raises:
      RefusedError: an empty prompt, or one too long, or settings out of range.
    """
    tokenizer, model = trained.run.tokenizer, trained.run.whole
    # Documents start behind the end token of the one before them.
    prompt_P = jnp.asarray([tokenizer.eos_id, *tokenizer.encode(prompt)], jnp.int32)
    if length is None:
        length = max(1, trained.run.job.data.seq_len - prompt_P.size)
    tokens = made_or_refused(
        lambda: model.generate(
            trained.params, prompt_P, length, jax.random.key(seed), temperature, top_k
        ),
        "sample",
    )
    added = tokens[prompt_P.size :].tolist()
    if tokenizer.eos_id in added:
        added = added[: added.index(tokenizer.eos_id)]
    return tokenizer.decode([*prompt_P[1:].tolist(), *added])
