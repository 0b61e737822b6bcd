"""Reads and writes LLaMA-shaped checkpoints: a folder with config.json and safetensors files.

The layout is that of Hugging Face transformers: `model.layers.<i>.self_attn.q_proj.weight` and so
on, with matrices stored [out, in]. Rotary pairs are (i, i + head_dim / 2) as here, so nothing is
permuted.

`stack_layers` and `unstack_layers` convert parameters between one subtree per layer and leaves
stacked over layers.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import safe_open
from safetensors.numpy import save_file

from lowcomm_jax.models.config import TransformerConfig
from lowcomm_jax.models.model import Model, Params, build
from lowcomm_jax.models.protocol import abstract_params
from lowcomm_jax.refused import refuse

DTYPES = ("float32", "bfloat16")
"""Of the tensors that are written."""
_FILE = "model.safetensors"
_NAMES = {  # of a module that holds a parameter, in the model or in a block
    "embedding": "embed_tokens",
    "final_norm": "norm",
    "attention_norm": "input_layernorm",
    "attention/query": "self_attn.q_proj",
    "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj",
    "attention/output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp/gate": "mlp.gate_proj",
    "mlp/up": "mlp.up_proj",
    "mlp/down": "mlp.down_proj",
}
# Fields of `TransformerConfig` by their names in config.json, with what transformers takes where
# one is absent; None = it must be there, or follows from others.
_FIELDS = {
    "vocab_size": ("vocab_size", 32_000),
    "layers": ("num_hidden_layers", None),
    "width": ("hidden_size", None),
    "heads": ("num_attention_heads", None),
    "kv_heads": ("num_key_value_heads", None),
    "head_dim": ("head_dim", None),
    "mlp_width": ("intermediate_size", None),
    "max_seq_len": ("max_position_embeddings", 2048),
    "rope_theta": ("rope_theta", 10_000.0),
    "tie_embeddings": ("tie_word_embeddings", False),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "init_std": ("initializer_range", 0.02),
}
# What this model is of the things that other LLaMAs may be.
_PLAIN = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}


def load_llama(path: str | pathlib.Path, **changes: Any) -> tuple[Model, Params]:
    """Builds the model that a checkpoint describes and loads its weights.

    Args:
      path: folder with config.json and one or more `.safetensors` files of any float dtype.
      **changes: fields of `TransformerConfig` to set differently (`layer_loop`, `remat`,
        `compute_dtype`, `z_loss`, ...). Changing a size makes the weights not fit.

    Returns:
      The model and its parameters: float32 NumPy arrays, nested as `Model.init` nests them.

    Raises:
      FileNotFoundError: no config.json or no safetensors file in `path`.
      ValueError: lists everything in config.json that this model does not have, or in the changes
        that no checkpoint has (QK-norm, GELU), or every tensor that is missing, unexpected or of
        another shape.
    """
    path = pathlib.Path(path)
    described = json.loads((path / "config.json").read_text(encoding="utf-8"))
    model = build(config_from_llama(described, **changes))
    refuse("load_llama", _beyond(model.config))
    return model, _assemble(model, read_tensors(path))


def save_llama(
    path: str | pathlib.Path, model: Model, params: Params, dtype: str = "float32"
) -> None:
    """Writes config.json and model.safetensors in `path`, for transformers or `load_llama`.

    Args:
      path: folder, made if needed.
      model: the model that `params` belong to.
      params: as `Model.init` returns them, or NumPy arrays of that structure.
      dtype: "float32" or "bfloat16", the dtype of the stored tensors.

    Raises:
      ValueError: lists the settings that a LLaMA checkpoint cannot express (QK-norm, GELU), and a
        wrong dtype.
    """
    write_llama(path, llama_tensors(model, params, dtype), config_to_llama(model.config, dtype))


def llama_tensors(model: Model, params: Params, dtype: str = "float32") -> dict[str, np.ndarray]:
    """The tensors of a LLaMA checkpoint by their names there; arguments as in `save_llama`.

    Raises:
      ValueError: as in `save_llama`.
    """
    config = model.config
    problems = [f"{problem}; save with Orbax instead" for problem in _beyond(config)]
    if dtype not in DTYPES:
        problems.append(f"dtype={dtype!r}: choose {' or '.join(DTYPES)}")
    refuse("save_llama", problems)
    if config.layer_loop == "scan":
        params = unstack_layers(params)
    tensors = {}
    for keys, leaf in flatten_dict(params).items():
        array = _turned(keys, np.asarray(jax.device_get(leaf)))
        tensors[_name(keys)] = np.ascontiguousarray(array, dtype=jnp.dtype(dtype))
    return tensors


def write_llama(
    path: str | pathlib.Path, tensors: dict[str, np.ndarray], described: dict[str, Any]
) -> None:
    """Writes tensors of `llama_tensors` and the config.json of `config_to_llama` in a folder.

    The file of an earlier checkpoint is replaced whole.
    """
    path = pathlib.Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config, part = path / "config.json", path / f".{_FILE}.part"
    save_file(tensors, part, metadata={"format": "pt"})
    config.write_text(json.dumps(described, indent=2) + "\n")
    # safetensors makes files that only their owner can read.
    part.chmod(config.stat().st_mode)
    part.replace(path / _FILE)


def read_tensors(path: str | pathlib.Path) -> dict[str, np.ndarray]:
    """The tensors of all safetensors files in a folder, by name, in their own dtypes.

    Raises:
      FileNotFoundError: there is none.
    """
    files = sorted(pathlib.Path(path).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"no *.safetensors file in {path}: give the folder of a LLaMA-shaped checkpoint"
        )
    tensors = {}
    for file in files:
        with safe_open(file, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                # Old checkpoints store the rotary frequencies, which follow from the config.
                if not name.endswith("rotary_emb.inv_freq"):
                    tensors[name] = opened.get_tensor(name)
    return tensors


def config_from_llama(described: dict[str, Any], **changes: Any) -> TransformerConfig:
    """Reads a transformers LLaMA configuration; absent entries take transformers' defaults.

    Raises:
      ValueError: lists every entry that this model does not have.
    """
    rope = described.get("rope_parameters") or {}
    scaling = described.get("rope_scaling") or rope
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    refused = [
        key for key, plain in _PLAIN.items() if (described.get(key, plain) or False) != plain
    ]
    refused += ["rope_scaling / rope_parameters"] * (kind != "default")
    problems = [f"{key}: only the plain LLaMA value is supported" for key in refused]
    needed = (_FIELDS[name][0] for name in ("width", "mlp_width", "heads", "layers"))
    problems += [f"{key}: missing" for key in needed if key not in described]
    refuse("config.json", problems)
    given = rope | described
    fields = {name: given.get(key, default) for name, (key, default) in _FIELDS.items()}
    fields["kv_heads"] = fields["kv_heads"] or fields["heads"]
    fields["head_dim"] = fields["head_dim"] or fields["width"] // fields["heads"]
    fields |= {name: float(fields[name]) for name in ("rope_theta", "norm_eps", "init_std")}
    fields["tie_embeddings"] = bool(fields["tie_embeddings"])
    return TransformerConfig(**{**fields, **changes})


def config_to_llama(config: TransformerConfig, dtype: str = "float32") -> dict[str, Any]:
    """Describes `config` as a transformers LLaMA configuration."""
    fields = {key: getattr(config, name) for name, (key, _) in _FIELDS.items()}
    return {"architectures": ["LlamaForCausalLM"], **_PLAIN, **fields, "torch_dtype": dtype}


def stack_layers(
    params: dict[Any, Any], stack: Callable[[Sequence[Any]], Any] = jnp.stack
) -> dict[Any, Any]:
    """Turns `blocks/<i>/...` (unrolled) into `blocks/...` with a leading layer axis (scan).

    Args:
      params: unrolled parameters.
      stack: joins the leaves of all layers; `np.stack` keeps NumPy leaves on the host.
    """
    blocks = params["blocks"]
    layers = [blocks[i] for i in range(len(blocks))]
    return {**params, "blocks": jax.tree.map(lambda *leaves: stack(leaves), *layers)}


def unstack_layers(params: dict[Any, Any]) -> dict[Any, Any]:
    """Turns `blocks/...` with a leading layer axis (scan) into `blocks/<i>/...` (unrolled)."""
    blocks = params["blocks"]
    layers = jax.tree.leaves(blocks)[0].shape[0]
    layer = {i: jax.tree.map(lambda leaf, i=i: leaf[i], blocks) for i in range(layers)}
    return {**params, "blocks": layer}


def _beyond(config: TransformerConfig) -> list[str]:
    """What a model has that a LLaMA checkpoint cannot express."""
    problems = []
    if config.qk_norm:
        problems.append("qk_norm=True: a LLaMA checkpoint has no QK-norm")
    if config.mlp != "swiglu":
        problems.append(f"mlp={config.mlp!r}: a LLaMA checkpoint has a SwiGLU")
    return problems


def _name(keys: tuple) -> str:
    """The name in a checkpoint of a parameter, by its path in unrolled parameters."""
    if keys[0] == "head":
        return "lm_head.weight"
    prefix, within = "model", keys[:-1]
    if keys[0] == "blocks":
        prefix, within = f"model.layers.{keys[1]}", keys[2:-1]
    return f"{prefix}.{_NAMES['/'.join(within)]}.weight"


def _turned(keys: tuple, x: np.ndarray) -> np.ndarray:
    """A parameter as a checkpoint stores it, and back: matrices are [out, in] there."""
    return x.T if keys[-1] == "kernel" else x


def _assemble(model: Model, tensors: dict[str, np.ndarray]) -> Params:
    """Puts the tensors into the structure of `model`, or lists all that do not fit."""
    if model.config.tie_embeddings and "lm_head.weight" in tensors:
        table, head = (tensors.get(n) for n in ("model.embed_tokens.weight", "lm_head.weight"))
        if table is not None and np.array_equal(table, head):
            del tensors["lm_head.weight"]
    scanned = model.config.layer_loop == "scan"
    shapes = abstract_params(model)
    shapes = flatten_dict(jax.eval_shape(unstack_layers, shapes) if scanned else shapes)
    names = {_name(keys): keys for keys in shapes}
    problems = [f"missing: {name}" for name in names if name not in tensors]
    problems += [f"unexpected: {name}" for name in sorted(tensors) if name not in names]
    leaves = {}
    for name, keys in names.items():
        if name not in tensors:
            continue
        array, expected = _turned(keys, tensors[name]), shapes[keys].shape
        if array.shape != expected:
            problems.append(f"shape of {name}: {array.shape} as [in, out], expected {expected}")
        leaves[keys] = np.ascontiguousarray(array, dtype=np.float32)
    refuse("weights do not fit config.json", problems)
    params = unflatten_dict(leaves)
    return stack_layers(params, np.stack) if scanned else params
