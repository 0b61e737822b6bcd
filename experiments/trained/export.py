"""Write the anchor of a run as a LLaMA-shaped safetensors checkpoint.

    python -m experiments export --workdir=runs/a --output=exported

`--step` takes the checkpoint of that step instead of the newest.
The folder holds config.json, generation_config.json, model.safetensors and the tokenizer. It is
readable by transformers (`AutoModelForCausalLM`, `AutoTokenizer`); --config.model.init_from reads
the weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from experiments.cli import Flags, flag_problems, made_or_refused, refuse_any
from experiments.progress import Work
from experiments.trained.anchor import Trained, load_trained
from lowcomm_jax.data.tokenizers import to_hugging_face
from lowcomm_jax.models.weights import save_llama


def main(argv: Sequence[str]) -> int:
    """Export as the command line says; returns the exit code."""
    options = Flags()
    options.text("workdir", None, "folder of the run")
    options.text("output", None, "folder to write")
    options.whole("step", None, "step of the checkpoint (default: the newest)")
    options.text("dtype", "float32", "type of the stored tensors: float32 or bfloat16")
    values = options.values
    problems = flag_problems("export", argv, values, __doc__)
    problems += [f"--{name} is missing" for name in ("workdir", "output") if not values[name].value]
    refuse_any(problems, "export")
    with Work("export", 3) as work:
        work.at("reads the checkpoint", 0)
        trained = load_trained(Path(values.workdir), values.step, "export")
        work.at("writes the weights", 1)
        params = jax.tree.map(np.asarray, trained.params)
        made_or_refused(
            lambda: save_llama(values.output, trained.run.whole, params, values.dtype), "export"
        )
        work.at("writes the tokenizer", 2)
        _save_tokenizer(Path(values.output), trained)
    print(f"step {trained.step} written to {values.output} in {values.dtype}")
    return 0


def _save_tokenizer(folder: Path, trained: Trained) -> None:
    """The tokenizer, and with which tokens a text ends."""
    tokenizer = trained.run.tokenizer
    backend = to_hugging_face(tokenizer)
    backend.save(str(folder / "tokenizer.json"))
    ends = {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": backend.id_to_token(tokenizer.eos_id),
        "pad_token": backend.id_to_token(tokenizer.pad_id),
        "model_max_length": trained.run.whole.config.max_seq_len,
        "clean_up_tokenization_spaces": False,
    }
    for name, content in (("tokenizer_config", described), ("generation_config", ends)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
