"""Describes a decoder-only transformer: one frozen record, checked as a whole."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from lowcomm_jax.refused import refuse
from lowcomm_jax.settings import FROM_1, described, misfits, number

LayerLoop = Literal["auto", "unrolled", "scan"]
Remat = Literal["auto", "none", "light", "full"]
ComputeDtype = Literal["float32", "bfloat16"]
Attention = Literal["auto", "xla", "cudnn", "splash"]
Mlp = Literal["swiglu", "gelu"]
_SMALL_TILES = 8  # an eighth of the logits: by then other arrays are the largest
_POSITIVE = number(lambda x: x > 0, "give a positive number")
_WEIGHT = number(lambda x: x >= 0, "give 0 (off) or a positive weight")


@described
@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The shape of a decoder-only transformer, and how it is computed.

    Raises:
      ValueError: lists every violated rule at once, each with its fix.
    """

    vocab_size: Annotated[int, FROM_1, "rows of the embedding table."]
    layers: Annotated[int, FROM_1, "transformer blocks."]
    width: Annotated[int, FROM_1, "entries of the residual stream."]
    heads: Annotated[int, FROM_1, "query heads."]
    kv_heads: Annotated[
        int, FROM_1, "key-value heads; fewer than `heads` = grouped-query attention."
    ]
    head_dim: Annotated[
        int,
        FROM_1,
        "width of a head; `heads * head_dim` need not equal `width` (DiLoCo's 60M has 16 heads of "
        "64 on a width of 896).",
    ]
    mlp_width: Annotated[int, FROM_1, "hidden width of the MLP."]
    max_seq_len: Annotated[
        int,
        FROM_1,
        "longest sequence the model is meant for, in tokens; a bound, not a size.",
    ] = 1024
    mlp: Annotated[Mlp, '"swiglu" (three matrices) or "gelu" (two matrices).'] = "swiglu"
    rope_theta: Annotated[float, _POSITIVE, "base of the rotary wavelengths."] = 10_000.0
    qk_norm: Annotated[
        bool,
        "RMS-normalise queries and keys per head, with a learned scale, before the rotation.",
    ] = False
    tie_embeddings: Annotated[bool, "use the embedding table as the output layer."] = False
    z_loss: Annotated[
        float, _WEIGHT, "weight of the mean squared log-partition in the loss (0 = off)."
    ] = 0.0
    norm_eps: Annotated[float, _POSITIVE, "added to the mean square inside every RMS norm."] = 1e-6
    init_std: Annotated[
        float,
        _POSITIVE,
        "standard deviation of the initial weights; the two projections that write to the residual "
        "stream start `sqrt(2 * layers)` times smaller.",
    ] = 0.02
    layer_loop: Annotated[
        LayerLoop,
        '"unrolled" (one leaf per layer), "scan" (leaves stacked over layers), or "auto": unrolled '
        "on CPU, scan elsewhere, decided when the model is built.",
    ] = "auto"
    unroll: Annotated[
        bool | None,
        'with "scan", whether the loop over layers is written out: the backward pass then keeps '
        "values where they are, instead of copying them into and out of stacks. None: on GPUs, "
        'where `remat` keeps much ("none", "light"), decided when the model is built.',
    ] = None
    remat: Annotated[
        Remat,
        'what the backward pass recomputes: "none", "light" (norms and the MLP\'s activation, no '
        'product) or "full" (everything inside a block). "auto" is "none" when a model is built; '
        "who knows the memory chooses before, among `ways`.",
    ] = "auto"
    loss_tiles: Annotated[
        int,
        FROM_1,
        "parts of the tokens whose logits are made one after another (`scores_in_tiles`). More "
        "than 1 saves memory and costs a product.",
    ] = 1
    compute_dtype: Annotated[
        ComputeDtype,
        "dtype of activations and matrix products; parameters, norms, softmax and loss stay "
        "float32.",
    ] = "float32"
    attention: Annotated[
        Attention,
        '"xla" (scores in memory), "cudnn" (flash attention on GPUs) or "splash" (the kernel that '
        'JAX ships for TPUs; sequences that are no multiple of 128 take "xla"). "auto" picks the '
        "device's kernel when the model is built (`attention.kernel_for`). Kernels take bfloat16 "
        "only.",
    ] = "auto"

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
    found = misfits(config)
    problems = [problem.text for problem in found]
    unusable = {problem.about for problem in found}
    if unusable.isdisjoint(("heads", "kv_heads")) and config.heads % config.kv_heads:
        problems.append(
            f"heads={config.heads} is no multiple of kv_heads={config.kv_heads}: "
            "choose kv_heads among the divisors of heads"
        )
    if "head_dim" not in unusable and config.head_dim % 2:
        problems.append(
            f"head_dim={config.head_dim} is odd: rotary embeddings need an even head_dim"
        )
    if config.attention in ("cudnn", "splash") and config.compute_dtype != "bfloat16":
        problems.append(
            f"attention={config.attention!r} has no float32 kernel: set compute_dtype='bfloat16' "
            "or attention='xla'"
        )
    return problems
