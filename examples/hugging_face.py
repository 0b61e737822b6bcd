"""Hugging Face weights in, a few steps in two regions, Hugging Face weights out.

Any LLaMA-shaped folder with config.json and safetensors files will do. This example writes a tiny
one itself, so that it needs no download. Takes about 20 s on a laptop.

    python examples/hugging_face.py runs/hugging_face
    python examples/hugging_face.py runs/hugging_face --weights=FOLDER_OF_YOUR_MODEL

The commands do the same: `train --config.model.init_from=FOLDER` and `export`. Afterwards
`transformers.AutoModelForCausalLM.from_pretrained(OUTPUT)` reads the result.
"""

import argparse
import pathlib

import jax
import numpy as np
import optax
from safetensors import safe_open

import lowcomm_jax as lc
from lowcomm_jax.models import TransformerConfig, build
from lowcomm_jax.models.weights import load_llama, save_llama

REGIONS, STEPS, BATCH, SEQ_LEN = 2, 40, 4, 64


def write_tiny_llama(folder):
    """A LLaMA of one layer over bytes, with random weights."""
    sizes = {"layers": 1, "width": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp_width": 64}
    model = build(TransformerConfig(vocab_size=256, max_seq_len=128, **sizes))
    save_llama(folder, model, jax.jit(model.init)(jax.random.key(0)))


arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument("folder", type=pathlib.Path, help="what is written goes there")
arguments.add_argument("--weights", type=pathlib.Path, help="of your model (default: a tiny one)")
given = arguments.parse_args()
if given.weights is None:
    given.weights = given.folder / "in"
    write_tiny_llama(given.weights)

model, params = load_llama(given.weights)
text = np.frombuffer(pathlib.Path(__file__).read_bytes(), np.uint8).astype(np.int32)


def samples(step):
    """Windows of this file's bytes, `[regions, batch, seq_len + 1]`. Yours: tokens of your text."""
    first = np.random.default_rng(step).integers(text.size - SEQ_LEN, size=(REGIONS, BATCH, 1))
    return {"tokens": text[first + np.arange(SEQ_LEN + 1)]}


engine = lc.Engine(
    model.loss_fn, optax.adamw(1e-2), method=lc.methods.diloco(period=10), regions=REGIONS
)
state = engine.init(params)
state, history = engine.run(state, (samples(step) for step in range(STEPS)))
state = engine.finish(state)

out = given.folder / "out"
save_llama(out, model, lc.global_params(state))
print(
    f"loss of the first and the last step: {history['loss'][0].mean():.2f} and "
    f"{history['loss'][-1].mean():.2f}"
)
with safe_open(out / "model.safetensors", framework="np") as written:
    names = sorted(written.keys())
print(f"{len(names)} tensors in {out}, the first of them {names[0]}")
_, again = load_llama(out)
same = jax.tree.map(np.array_equal, again, jax.device_get(lc.global_params(state)))
print(f"read again, every value is the same: {jax.tree.all(same)}")
