"""Write the anchor of a run as a LLaMA-shaped safetensors checkpoint, or what changed in it.

    python -m experiments export --workdir=runs/a --output=exported
    python -m experiments export --workdir=runs/a --since=200 --output=200_to_400.safetensors
    python -m experiments export --apply=200_to_400.safetensors --onto=exported --output=exported

`--step` takes the checkpoint of that step instead of the newest. `--since` writes a patch: the bf16
values that differ between the checkpoint of that step and this one. `--apply` makes the newer
weights of the older ones, in bf16, and checks their digest before anything is written.

The folder holds config.json, generation_config.json, model.safetensors and the tokenizer. It is
readable by transformers (`AutoModelForCausalLM`, `AutoTokenizer`); --config.model.init_from reads
the weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError

from experiments.cli import Flags, RefusedError, made_or_refused
from experiments.progress import Work
from experiments.refusals import checked_flags
from experiments.trained.anchor import Trained, load_trained
from lowcomm_jax.models.weight_patch import apply_patch, write_patch
from lowcomm_jax.models.weights import (
    DTYPES,
    llama_tensors,
    read_tensors,
    save_llama,
    write_llama,
)

_CONFIG = "config.json"


def main(argv: Sequence[str]) -> int:
    """Export as the command line says; returns the exit code."""
    options = Flags()
    options.text("workdir", None, "folder of the run")
    options.text("output", None, "folder to write; with --since the file")
    options.whole("step", None, "step of the checkpoint (default: the newest)")
    options.text("dtype", "float32", "type of the stored tensors: float32 or bfloat16")
    options.whole("since", None, "step of an older checkpoint: write a patch from its weights")
    options.text("apply", None, "a patch to apply instead")
    options.text("onto", None, "folder of the export that a patch is applied to")
    values = options.values
    checked_flags("export", argv, values, __doc__, known=DTYPES)
    if values.apply is not None:
        return _apply(Path(values.apply), Path(values.onto), Path(values.output))
    if values.since is not None:
        return _patch(Path(values.workdir), values.since, values.step, Path(values.output))
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


def _patch(workdir: Path, since: int, step: int | None, file: Path) -> int:
    """Write the patch between two checkpoints of a run."""
    with Work("export", 3) as work:
        work.at("reads the newer checkpoint", 0)
        newer = load_trained(workdir, step, "export")
        if since >= newer.step:
            line = f"--since={since}: not older than step {newer.step}, which it leads to"
            raise RefusedError([line], "export")
        work.at("reads the older checkpoint", 1)
        older = load_trained(workdir, since, "export")
        work.at("writes the patch", 2)
        old, new = (_tensors(trained) for trained in (older, newer))
        steps = {"since": f"{older.step}", "step": f"{newer.step}"}
        file.parent.mkdir(parents=True, exist_ok=True)
        changed = made_or_refused(lambda: write_patch(file, old, new, steps), "export")
    count, size = sum(x.size for x in new.values()), file.stat().st_size
    print(
        f"step {older.step} to {newer.step}: {changed:,} of {count:,} weights changed in bf16 "
        f"({changed / count:.2%}); {size:,} bytes written to {file}, {size / (2 * count):.1%} of "
        "all weights in bf16"
    )
    return 0


def _tensors(trained: Trained) -> dict[str, np.ndarray]:
    params = jax.tree.map(np.asarray, trained.params)
    return made_or_refused(lambda: llama_tensors(trained.run.whole, params, "bfloat16"), "export")


def _apply(patch: Path, onto: Path, output: Path) -> int:
    """Apply a patch to an export, and write an export."""
    described, older = _exported(onto)
    newer = made_or_refused(lambda: apply_patch(patch, older), "export")
    output.mkdir(parents=True, exist_ok=True)
    for file in onto.glob("*.json"):
        if file.name != _CONFIG and output.resolve() != onto.resolve():
            shutil.copyfile(file, output / file.name)
    write_llama(output, newer, described | {"torch_dtype": "bfloat16"})
    print(f"{onto} with {patch} written to {output} in bfloat16; its digest is as written")
    return 0


def _exported(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The description and the tensors of an export."""
    try:
        described = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        return dict(described), read_tensors(folder)
    except (FileNotFoundError, ValueError, TypeError, SafetensorError) as error:
        line = f"--onto={folder}: no export lies there that can be read ({error})"
        raise RefusedError([line], "export") from error


def _save_tokenizer(folder: Path, trained: Trained) -> None:
    """The tokenizer, and with which tokens a text ends."""
    tokenizer = trained.run.tokenizer
    backend = tokenizer.backend
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
