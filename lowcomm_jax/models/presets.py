"""Names the model sizes of the published runs, and one small enough for a laptop."""

from __future__ import annotations

import dataclasses
from typing import Any

from lowcomm_jax.models.config import TransformerConfig
from lowcomm_jax.refused import is_unknown


def _dense(layers: int, heads: int, width: int, head_dim: int, **changes: Any) -> TransformerConfig:
    """Builds a Chinchilla-style decoder: multi-head attention, GELU of four widths, tied table."""
    return TransformerConfig(
        layers=layers,
        heads=heads,
        kv_heads=heads,
        width=width,
        head_dim=head_dim,
        mlp_width=4 * width,
        mlp="gelu",
        **{"tie_embeddings": True, **changes},
    )


def _diloco(layers: int, heads: int, width: int, head_dim: int) -> TransformerConfig:
    """arXiv 2311.08105, table 1: C4, SentencePiece vocabulary of 32,000, sequences of 1024."""
    return _dense(layers, heads, width, head_dim, vocab_size=32_000, max_seq_len=1024)


def _scaling(layers: int, heads: int, width: int, **changes: Any) -> TransformerConfig:
    """arXiv 2503.09799: vocabulary 32,768, sequences of 2048, QK-norm, z-loss 1e-4."""
    return _dense(
        layers,
        heads,
        width,
        width // heads,
        vocab_size=32_768,
        max_seq_len=2048,
        qk_norm=True,
        z_loss=1e-4,
        **changes,
    )


_NANO = TransformerConfig(
    vocab_size=256,
    layers=4,
    width=128,
    heads=4,
    kv_heads=4,
    head_dim=32,
    mlp_width=448,
    max_seq_len=256,
    tie_embeddings=True,
    z_loss=1e-4,
)

# The public configuration of the model that CoCoDC's runs name (OpenDiLoCo's 150M LLaMA): 12
# blocks of 1024, 16 heads, MLP 2688, norm epsilon 1e-5; everything else is the LLaMA default
# (vocabulary 32,000, untied). "150M" counts the blocks alone; with both tables it is 215M.
_LLAMA_150M = TransformerConfig(
    vocab_size=32_000,
    layers=12,
    width=1024,
    heads=16,
    kv_heads=16,
    head_dim=64,
    mlp_width=2688,
    max_seq_len=1024,
    norm_eps=1e-5,
)

# Qwen1.5-110B's public configuration cut from 80 to 78 blocks, as DiLoCoX trained it (recalled from
# arXiv 2506.21263, not checked); without its biases of queries, keys and values.
_QWEN_107B = TransformerConfig(
    vocab_size=152_064,
    layers=78,
    width=8192,
    heads=64,
    kv_heads=8,
    head_dim=128,
    mlp_width=49_152,
    max_seq_len=2048,
    rope_theta=1e6,
)


def _llama(layers: int, heads: int, width: int, mlp_width: int, **changes) -> TransformerConfig:
    """Builds a LLaMA: SwiGLU, untied tables, heads of 128."""
    fields = {"vocab_size": 128_256, "kv_heads": 8, "rope_theta": 5e5, "norm_eps": 1e-5}
    fields |= {"max_seq_len": 8192, **changes}
    return TransformerConfig(
        layers=layers, heads=heads, width=width, head_dim=128, mlp_width=mlp_width, **fields
    )


# The first LLaMA of 7B (arXiv 2302.13971), and those of 8B and 70B (arXiv 2407.21783).
_LLAMA_7B = _llama(
    32,
    32,
    4096,
    11_008,
    vocab_size=32_000,
    kv_heads=32,
    rope_theta=1e4,
    norm_eps=1e-6,
    max_seq_len=2048,
)

# NoLoCo's largest model (arXiv 2506.10911): 6.4B in its blocks.
_NOLOCO_6_8B = _dense(32, 32, 4096, 128, vocab_size=128_002, max_seq_len=2048)

PRESETS = {
    "nano": _NANO,
    "diloco_60m": _diloco(3, 16, 896, 64),
    "diloco_150m": _diloco(12, 16, 896, 64),
    "diloco_400m": _diloco(12, 12, 1536, 128),
    "scaling_35m": _scaling(6, 8, 512),
    "scaling_90m": _scaling(9, 12, 768),
    "scaling_180m": _scaling(12, 16, 1024),
    "scaling_330m": _scaling(15, 20, 1280),
    "scaling_550m": _scaling(18, 24, 1536),
    "scaling_1_3b": _scaling(24, 32, 2048),
    "scaling_2_4b": _scaling(30, 40, 2560),
    "scaling_4b": _scaling(36, 48, 3072),
    "scaling_10b": _scaling(48, 64, 4096),
    "scaling_100b": _scaling(108, 68, 8704, tie_embeddings=False),
    "llama_150m": _LLAMA_150M,
    "llama_7b": _LLAMA_7B,
    "llama_8b": _llama(32, 32, 4096, 14_336),
    "llama_70b": _llama(80, 64, 8192, 28_672),
    "noloco_6_8b": _NOLOCO_6_8B,
    "qwen_107b": _QWEN_107B,
}


def preset(name: str, **changes: Any) -> TransformerConfig:
    """Returns the preset `name`, with `changes` to its fields.

    Sizes are those of the papers. Differs from the papers: rotary instead of learned or relative
    positions, RMS norm without bias throughout.

    Raises:
      ValueError: an unknown name (the known ones are listed), an unknown field, or a
        configuration that breaks a rule of `TransformerConfig`.
    """
    problems = []
    if name not in PRESETS:
        problems.append(f"preset {name!r} {is_unknown(name, PRESETS, 'choose one of')}")
    fields = [field.name for field in dataclasses.fields(TransformerConfig)]
    unknown = [key for key in changes if key not in fields]
    if unknown:
        problems.append(
            f"unknown fields {', '.join(unknown)}: TransformerConfig has {', '.join(fields)}"
        )
    if problems:
        raise ValueError("\n".join(problems))
    return dataclasses.replace(PRESETS[name], **changes)
