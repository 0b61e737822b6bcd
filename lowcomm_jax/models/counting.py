"""Counts parameters and arithmetic of a transformer from its configuration alone."""

from __future__ import annotations

from lowcomm_jax.models.config import TransformerConfig


def param_count(config: TransformerConfig) -> int:
    """Counts all parameters, embedding and output table included (once when tied)."""
    tables = (1 if config.tie_embeddings else 2) * config.vocab_size * config.width
    norms = config.layers * (2 * config.width + 2 * config.head_dim * config.qk_norm)
    return tables + config.layers * _block_matrix_entries(config) + norms + config.width


def flops_per_token(config: TransformerConfig, seq_len: int) -> float:
    """Counts the floating-point operations of one training step per token.

    `6 N + 6 layers heads head_dim seq_len`: a multiply and an add per weight in the forward pass
    and twice that backward, where N counts the weights of matrix products (blocks and output
    layer; the embedding look-up is no product); plus the two products of attention, where a
    causal token sees seq_len / 2 others on average. Recomputation (remat) is not counted.
    """
    weights = config.layers * _block_matrix_entries(config) + config.vocab_size * config.width
    attention = 6 * config.layers * config.heads * config.head_dim * seq_len
    return float(6 * weights + attention)


def _block_matrix_entries(config: TransformerConfig) -> int:
    attention = 2 * config.width * config.head_dim * (config.heads + config.kv_heads)
    return attention + (3 if config.mlp == "swiglu" else 2) * config.width * config.mlp_width
