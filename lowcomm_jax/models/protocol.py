"""What a model is to a run: a few functions over a pytree of parameters.

`Trainable` is the protocol. The built-in decoder (`model.Model`) and its stages (`Pipeline`) follow
it; so does whatever a `module:factory` in a config returns. What a model may leave out is read by
the functions below, which say what takes its place.

Shape suffixes: B sequences, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
from jax import Array


@runtime_checkable
class Trainable(Protocol):
    """A model that commands train: `init` and `loss_fn`, and what it knows beyond these.

    A model may also have:

    - `specs(params, axis_sizes)`: a tree of PartitionSpecs, one for each parameter, over the axes
      inside a region (`fsdp`, `tensor`). `params` may be shapes; `axis_sizes` maps an axis to its
      size, and an axis must divide the dimension that it cuts. Without it: the engine's layout.
    - `flops_per_token(seq_len)`: floating-point operations of a training step for each token,
      forward and backward. Without it no MFU is shown, and a plan asks for `compute_s`.
    - `stacked`: path prefixes of leaves with a leading axis of layers or experts, whose rows codecs
      and Muon treat as matrices of their own. Without it: none.
    - `logits(params, tokens)`: scores of the next token, float32 `[B, T, V]` for int32 `[B, T]`.
      An evaluation then takes one pass. Without it `loss_fn` is called for each document of each
      sequence, and its loss is counted, or `aux["ce"]` where aux has it.
    """

    def init(self, rng: Array) -> Any:
        """Draw the initial parameters, a pytree of arrays; works under `jit` and `eval_shape`."""

    def loss_fn(self, params: Any, batch: Mapping[str, Array], rng: Array) -> Any:
        """Give the mean loss over the targets that count, in nats.

        Args:
          params: as `init` draws them.
          batch: `tokens` int32 `[B, T + 1]`; `mask` float32 `[B, T]`, 1 where the target (the token
            after the position) counts.
          rng: a key of this region and step, for dropout; the same one in every evaluation.

        Returns:
          A scalar, or `(loss, aux)` with a dict of scalars, the run's further metrics.
        """


def abstract_params(model: Trainable) -> Any:
    """Shapes of the model's parameters; nothing is allocated."""
    return jax.eval_shape(lambda: model.init(jax.random.key(0)))


def param_count(model: Trainable) -> int:
    """Number of parameters."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(model)))


def stacked_prefixes(model: Trainable) -> tuple[str, ...]:
    """Path prefixes of leaves with a leading axis of layers or experts."""
    return tuple(getattr(model, "stacked", ()))


def flops_per_token(model: Trainable, seq_len: int) -> float | None:
    """Training arithmetic for each token; None = the model does not say."""
    count = getattr(model, "flops_per_token", None)
    return None if count is None else count(seq_len)
