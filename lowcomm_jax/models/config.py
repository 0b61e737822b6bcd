"""Describes a decoder-only transformer: one frozen record, checked as a whole."""

from __future__ import annotations

import dataclasses
import typing
from typing import Literal

from lowcomm_jax.refused import at_least, refuse

LayerLoop = Literal["auto", "unrolled", "scan"]
Remat = Literal["auto", "none", "light", "full"]
ComputeDtype = Literal["float32", "bfloat16"]
Attention = Literal["auto", "xla", "cudnn", "splash"]
Mlp = Literal["swiglu", "gelu"]
_SMALL_TILES = 8  # an eighth of the logits: by then other arrays are the largest


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The shape of a decoder-only transformer, and how it is computed.

    Attributes:
      vocab_size: rows of the embedding table.
      layers: transformer blocks.
      width: entries of the residual stream.
      heads: query heads.
      kv_heads: key-value heads; fewer than `heads` = grouped-query attention.
      head_dim: width of a head; `heads * head_dim` need not equal `width` (DiLoCo's 60M has 16
        heads of 64 on a width of 896).
      mlp_width: hidden width of the MLP.
      max_seq_len: longest sequence the model is meant for, in tokens; a bound, not a size.
      mlp: "swiglu" (three matrices) or "gelu" (two matrices).
      rope_theta: base of the rotary wavelengths.
      qk_norm: RMS-normalise queries and keys per head, with a learned scale, before the rotation.
      tie_embeddings: use the embedding table as the output layer.
      z_loss: weight of the mean squared log-partition in the loss (0 = off).
      norm_eps: added to the mean square inside every RMS norm.
      init_std: standard deviation of the initial weights; the two projections that write to the
        residual stream start `sqrt(2 * layers)` times smaller.
      layer_loop: "unrolled" (one leaf per layer), "scan" (leaves stacked over layers), or "auto":
        unrolled on CPU, scan elsewhere, decided when the model is built.
      unroll: with "scan", whether the loop over layers is written out: the backward pass then
        keeps values where they are, instead of copying them into and out of stacks. None: on GPUs,
        where `remat` keeps much ("none", "light"), decided when the model is built.
      remat: what the backward pass recomputes: "none", "light" (norms and the MLP's activation, no
        product) or "full" (everything inside a block). "auto" is "none" when a model is built; who
        knows the memory chooses before, among `ways`.
      loss_tiles: parts of the tokens whose logits are made one after another (`scores_in_tiles`).
        More than 1 saves memory and costs a product.
      compute_dtype: dtype of activations and matrix products; parameters, norms, softmax and loss
        stay float32.
      attention: "xla" (scores in memory), "cudnn" (flash attention on GPUs) or "splash" (the kernel
        that JAX ships for TPUs; sequences that are no multiple of 128 take "xla"). "auto" picks
        the device's kernel when the model is built (`attention.kernel_for`). Kernels take bfloat16
        only.

    Raises:
      ValueError: lists every violated rule at once, each with its fix.
    """

    vocab_size: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    max_seq_len: int = 1024
    mlp: Mlp = "swiglu"
    rope_theta: float = 10_000.0
    qk_norm: bool = False
    tie_embeddings: bool = False
    z_loss: float = 0.0
    norm_eps: float = 1e-6
    init_std: float = 0.02
    layer_loop: LayerLoop = "auto"
    unroll: bool | None = None
    remat: Remat = "auto"
    loss_tiles: int = 1
    compute_dtype: ComputeDtype = "float32"
    attention: Attention = "auto"

    def __post_init__(self) -> None:
        refuse("TransformerConfig", _violations(self))


def ways(config: TransformerConfig) -> list[TransformerConfig]:
    """How a model with `remat="auto"` can be computed, from the fastest to the smallest.

    Weights and their names, and results up to rounding, are the same in all of them.

    >>> small = TransformerConfig(vocab_size=9, layers=1, width=8, heads=1, kv_heads=1, head_dim=8,
    ...                           mlp_width=8)
    >>> [(way.remat, way.loss_tiles) for way in ways(small)]
    [('none', 1), ('light', 1), ('full', 1), ('full', 8)]
    """
    if config.remat != "auto":
        return [config]
    steps = [(remat, config.loss_tiles) for remat in ("none", "light", "full")]
    if config.loss_tiles == 1:
        steps.append(("full", _SMALL_TILES))
    return [dataclasses.replace(config, remat=remat, loss_tiles=tiles) for remat, tiles in steps]


def _violations(config: TransformerConfig) -> list[str]:
    """Lists every broken rule of `config`, each with its fix."""
    types, given = typing.get_type_hints(TransformerConfig), vars(config)
    sizes = [at_least(name, value, 1) for name, value in given.items() if types[name] is int]
    problems = [line for line in sizes if line is not None]
    if not problems:  # else these rules could not divide
        if config.heads % config.kv_heads:
            problems.append(
                f"heads={config.heads} is no multiple of kv_heads={config.kv_heads}: "
                "choose kv_heads among the divisors of heads"
            )
        if config.head_dim % 2:
            problems.append(
                f"head_dim={config.head_dim} is odd: rotary embeddings need an even head_dim"
            )
    for name, value in given.items():
        choices = typing.get_args(types[name])
        if typing.get_origin(types[name]) is Literal and value not in choices:
            problems.append(f"{name}={value!r}: choose one of {', '.join(choices)}")
    for name in ("rope_theta", "norm_eps", "init_std"):
        if not getattr(config, name) > 0:
            problems.append(f"{name}={getattr(config, name)!r}: give a positive number")
    if not config.z_loss >= 0:
        problems.append(f"z_loss={config.z_loss!r}: give 0 (off) or a positive weight")
    if config.attention in ("cudnn", "splash") and config.compute_dtype != "bfloat16":
        problems.append(
            f"attention={config.attention!r} has no float32 kernel: set compute_dtype='bfloat16' "
            "or attention='xla'"
        )
    return problems
