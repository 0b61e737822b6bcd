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
from safetensors import safe_open
from safetensors.numpy import save_file

from lowcomm_jax.models.config import TransformerConfig
from lowcomm_jax.models.model import Model, Params, build

_FILE = "model.safetensors"
_BLOCK_NAMES = {
    "input_layernorm.weight": ("attention_norm", "scale"),
    "self_attn.q_proj.weight": ("attention", "query", "kernel"),
    "self_attn.k_proj.weight": ("attention", "key", "kernel"),
    "self_attn.v_proj.weight": ("attention", "value", "kernel"),
    "self_attn.o_proj.weight": ("attention", "output", "kernel"),
    "post_attention_layernorm.weight": ("mlp_norm", "scale"),
    "mlp.gate_proj.weight": ("mlp", "gate", "kernel"),
    "mlp.up_proj.weight": ("mlp", "up", "kernel"),
    "mlp.down_proj.weight": ("mlp", "down", "kernel"),
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
      ValueError: lists everything in config.json that this model does not have, or every tensor
        that is missing, unexpected or of another shape.
    """
    path = pathlib.Path(path)
    described = json.loads((path / "config.json").read_text(encoding="utf-8"))
    model = build(config_from_llama(described, **changes))
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
    problems = []
    if config.qk_norm:
        problems.append("qk_norm=True: a LLaMA checkpoint has no QK-norm; save with Orbax instead")
    if config.mlp != "swiglu":
        problems.append(f"mlp={config.mlp!r}: a LLaMA checkpoint has a SwiGLU; save with Orbax")
    if dtype not in ("float32", "bfloat16"):
        problems.append(f"dtype={dtype!r}: choose float32 or bfloat16")
    if problems:
        raise ValueError("save_llama:\n" + "\n".join(f"  - {p}" for p in problems))
    if config.layer_loop == "scan":
        params = unstack_layers(params)
    tensors = {}
    for name, keys in _names(config).items():
        array = np.asarray(jax.device_get(_lookup(params, keys)))
        array = array.T if keys[-1] == "kernel" else array
        tensors[name] = np.ascontiguousarray(array, dtype=jnp.dtype(dtype))
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
    refused = {
        "model_type": described.get("model_type", "llama") != "llama",
        "hidden_act": described.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(described.get("attention_bias", False)),
        "mlp_bias": bool(described.get("mlp_bias", False)),
        "rope_scaling / rope_parameters": (
            scaling.get("rope_type", scaling.get("type", "default")) != "default"
        ),
    }
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    problems = [
        f"{key}: only the plain LLaMA value is supported" for key in refused if refused[key]
    ]
    problems += [f"{key}: missing" for key in needed if key not in described]
    if problems:
        raise ValueError("config.json:\n" + "\n".join(f"  - {p}" for p in problems))
    heads = described["num_attention_heads"]
    fields = {
        "vocab_size": described.get("vocab_size", 32_000),
        "layers": described["num_hidden_layers"],
        "width": described["hidden_size"],
        "heads": heads,
        "kv_heads": described.get("num_key_value_heads") or heads,
        "head_dim": described.get("head_dim") or described["hidden_size"] // heads,
        "mlp_width": described["intermediate_size"],
        "max_seq_len": described.get("max_position_embeddings", 2048),
        "rope_theta": float(described.get("rope_theta", rope.get("rope_theta", 10_000.0))),
        "tie_embeddings": bool(described.get("tie_word_embeddings", False)),
        "norm_eps": float(described.get("rms_norm_eps", 1e-6)),
        "init_std": float(described.get("initializer_range", 0.02)),
    }
    return TransformerConfig(**{**fields, **changes})


def config_to_llama(config: TransformerConfig, dtype: str = "float32") -> dict[str, Any]:
    """Describes `config` as a transformers LLaMA configuration."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.layers,
        "hidden_size": config.width,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_width,
        "max_position_embeddings": config.max_seq_len,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
    }


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


def _names(config: TransformerConfig) -> dict[str, tuple]:
    """Maps every tensor name of the checkpoint to its path in unrolled parameters."""
    names: dict[str, tuple] = {
        "model.embed_tokens.weight": ("embedding", "table"),
        "model.norm.weight": ("final_norm", "scale"),
    }
    if not config.tie_embeddings:
        names["lm_head.weight"] = ("head", "kernel")
    for layer in range(config.layers):
        for name, keys in _BLOCK_NAMES.items():
            names[f"model.layers.{layer}.{name}"] = ("blocks", layer, *keys)
    return names


def _assemble(model: Model, tensors: dict[str, np.ndarray]) -> Params:
    """Puts the tensors into the structure of `model`, or lists all that do not fit."""
    names = _names(model.config)
    if model.config.tie_embeddings and "lm_head.weight" in tensors:
        table, head = (tensors.get(n) for n in ("model.embed_tokens.weight", "lm_head.weight"))
        if table is not None and np.array_equal(table, head):
            del tensors["lm_head.weight"]
    problems = [f"missing: {name}" for name in names if name not in tensors]
    problems += [f"unexpected: {name}" for name in sorted(tensors) if name not in names]

    shapes = jax.eval_shape(model.init, jax.random.key(0))
    if model.config.layer_loop == "scan":
        shapes = jax.eval_shape(unstack_layers, shapes)
    params: Params = {}
    for name, keys in names.items():
        if name not in tensors:
            continue
        array = tensors[name].T if keys[-1] == "kernel" else tensors[name]
        expected = _lookup(shapes, keys).shape
        if array.shape != expected:
            problems.append(f"shape of {name}: {array.shape} as [in, out], expected {expected}")
        _insert(params, keys, np.ascontiguousarray(array, dtype=np.float32))
    if problems:
        raise ValueError("weights do not fit config.json:\n" + "\n".join(problems))
    return stack_layers(params, np.stack) if model.config.layer_loop == "scan" else params


def _lookup(tree: Any, keys: tuple) -> Any:
    for key in keys:
        tree = tree[key]
    return tree


def _insert(tree: Any, keys: tuple, leaf: np.ndarray) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
    tree[keys[-1]] = leaf
