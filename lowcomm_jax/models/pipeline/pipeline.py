"""A transformer cut into pipeline stages, trained by one of two schedules.

`Pipeline` offers a `Model` in stages as pure functions, like the model itself. `pipeline_problems`
and `schedule_problems` list refusals before any work starts.

GPipe's schedule (`stages.gpipe`, arXiv 1811.06965, section 2) keeps the activations of all M
microbatches for the backward pass. 1F1B (`one_f_one_b`) keeps the stage's inputs of 2 S - 1 of
them, with the same bubble, and computes each stage's forward pass twice. docs/pipelines.md has
figures of both. Stages as in DiLoCoX, arXiv 2506.21263.

Differs from the papers: embedding and output layer are not part of the first and last stage, which
would then be the slowest. Each stage holds a slice of the vocabulary and works on all microbatches
with it, so that stages are balanced for any depth and vocabulary. This costs one fp32 sum of
activations over the stages per microbatch.

Shape suffixes: M microbatches, B sequences of one, T time, N = B * T, D width, C the stage's part
of the vocabulary, L the stage's blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from lowcomm_jax.mesh import pipeline_paths, stages
from lowcomm_jax.mesh.pipeline_paths import LABEL_BYTES, Hop, Paths
from lowcomm_jax.mesh.regions import REGION
from lowcomm_jax.mesh.stages import STAGE
from lowcomm_jax.models.config import TransformerConfig
from lowcomm_jax.models.loss import scores, weighted_loss
from lowcomm_jax.models.model import Model, Params
from lowcomm_jax.models.pipeline.layout import StageLayout
from lowcomm_jax.models.pipeline.one_f_one_b import OneFOneB
from lowcomm_jax.models.protocol import param_count
from lowcomm_jax.models.transformer import Transformer
from lowcomm_jax.refused import refuse

Schedule = Literal["gpipe", "1f1b"]
_HIDDEN = -1e30  # logit of a padding token: its share underflows to exactly 0, yet stays finite


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Offers a model in stages as pure functions, like `Model`.

    `params` are those of the scanned model with `StageLayout.cut`'s padding; `specs` says where
    they lie. The loss and its gradients are the model's, within fp32 rounding.

    Attributes:
      model: with `layer_loop="scan"`.
      mesh: with the axes of `regions.AXES`; its `stage` axis gives S.
      microbatches: M, into which a region's batch is cut.
      routed: in the loss, let every microbatch take a random path through the regions' stages
        (NoLoCo, arXiv 2506.10911, section 3). A stage then trains on the data of all regions. Needs
        GPipe's schedule, and an engine whose regions have a slot of the mesh each and that books
        the traffic (`hops=`). `logits` takes the fixed path.
      schedule: of the loss's gradients. With 1F1B those of its aux are taken as 0.
      seed: of the permutations that paths are made of (`pipeline_paths.table`).

    Raises:
      ValueError: a model that is not scanned, more stages than blocks, no microbatch, a schedule
        that is unknown or does not fit.
    """

    model: Model
    mesh: Mesh
    microbatches: int
    routed: bool = False
    schedule: Schedule = "gpipe"
    seed: int = 0

    def __post_init__(self) -> None:
        count = self.mesh.shape[STAGE]
        problems = pipeline_problems(self.model.config, count, self.microbatches)
        problems += schedule_problems(self.schedule, self.routed)
        refuse("this pipeline cannot work", problems)

    @property
    def config(self) -> TransformerConfig:
        return self.model.config

    @property
    def layout(self) -> StageLayout:
        return StageLayout(self.model, self.mesh.shape[STAGE])

    @property
    def bubble(self) -> float:
        """Share of the ticks in which a stage is idle."""
        return stages.bubble(self.layout.stages, self.microbatches)

    @property
    def paths(self) -> Paths:
        """Ways of the microbatches through the stages of the regions, a slot of the mesh each."""
        regions = self.mesh.shape[REGION]
        return Paths(regions, self.layout.stages, self.microbatches, self.seed)

    def hops(self, batch: Mapping[str, Any], keys_N: Array) -> list[list[Hop]]:
        """Transfers of `loss_fn` and its gradient between regions, where microbatches are routed.

        Args:
          batch: one region's, or its shapes.
          keys_N: region 0's `rng` of N calls.

        Returns:
          The transfers of each call, in order.
        """
        count, length = batch["tokens"].shape
        tokens = count // self.microbatches * (length - 1)
        sizes = tokens * self.config.width * jnp.dtype(self.config.compute_dtype).itemsize
        row_NxT = np.asarray(_drawn(jax.random.key_data(keys_N), self.paths))
        return [self.paths.hops(row_T, sizes, tokens * LABEL_BYTES) for row_T in row_NxT]

    def report(self) -> dict[str, Any]:
        """Figures of a run's report; `bubble` and `padding` are shares of ticks and parameters."""
        return {
            "stages": self.layout.stages,
            "blocks_per_stage": self.layout.blocks,
            "microbatches": self.microbatches,
            "schedule": self.schedule,
            "bubble": self.bubble,
            "padding": 1 - param_count(self.model) / param_count(self),
        }

    @property
    def stacked(self) -> tuple[str, ...]:
        """Path prefixes of leaves with a leading layer axis."""
        return self.model.stacked

    def flops_per_token(self, seq_len: int) -> float:
        """Useful arithmetic per token: neither padding nor idle ticks count."""
        return self.model.flops_per_token(seq_len)

    def init(self, rng: Array) -> Params:
        """Draws the model's initial parameters, cut for the stages."""
        return self.layout.cut(self.model.init(rng))

    def specs(self, params: Params, axis_sizes: Mapping[str, int] | None = None) -> Params:
        """Returns a PartitionSpec per leaf over the axes inside a region."""
        return self.layout.specs(params, axis_sizes or dict(self.mesh.shape))

    def loss_fn(
        self, params: Params, batch: Mapping[str, Array], rng: Array
    ) -> tuple[Array, dict[str, Array]]:
        """`Model.loss_fn` of one region's batch, in M microbatches.

        Sequence i belongs to microbatch i mod M, so that each lies over `fsdp` as the batch does.

        Raises:
          ValueError: the batch does not divide into M microbatches.
        """
        tokens = batch["tokens"]
        mask = batch.get("mask")
        mask = jnp.ones(tokens[:, 1:].shape, jnp.float32) if mask is None else mask
        count = jnp.sum(mask)
        weight = mask / jnp.maximum(count, 1.0)
        cut = functools.partial(_microbatches, count=self.microbatches)
        specs = self._stage_specs(params)
        loss_of = stages.over_stages(self._stage_loss, self.mesh, (specs, P(), P(), P()), P())
        if self.schedule == "1f1b":
            gradients = functools.partial(self._stage_gradients, specs)
            run = stages.over_stages(gradients, self.mesh, (specs, P(), P()), (P(), specs))
            loss, aux = _with_gradients(loss_of, run)(params, cut(tokens), cut(weight))
        else:
            key = jax.random.key_data(rng) if self.routed else None
            loss, aux = loss_of(params, cut(tokens), cut(weight), key)
        return loss, {**aux, "tokens": count}

    def logits(self, params: Params, tokens: Array) -> Array:
        """Returns [B, T, V] float32 for int32 `tokens` [B, T], in gcd(B, M) microbatches."""
        batch, length = tokens.shape
        count = math.gcd(self.microbatches, batch)
        run = stages.over_stages(
            self._stage_logits,
            self.mesh,
            (self._stage_specs(params), P()),
            P(None, None, STAGE),
        )
        logits_MxNxV = run(params, _microbatches(tokens, count)).astype(jnp.float32)
        logits = logits_MxNxV.reshape(count, batch // count, length, -1).swapaxes(0, 1)
        return logits.reshape(batch, length, -1)[..., : self.config.vocab_size]

    def _stage_specs(self, params: Params) -> Params:
        return jax.tree.map(stages.stage_part, self.specs(params))

    # -- one stage ----------------------------------------------------------------------------

    def _bind(self, params: Params) -> Transformer:
        """The NNX module of this stage's part."""
        scale = params["final_norm"]["scale"]
        if scale.shape[0] < self.config.width:
            scale = stages.whole(scale)
        return self.model.bind({**params, "final_norm": {"scale": scale}})

    def _enter(self, module: Transformer, token_N: Array) -> Array:
        """Embeddings [N, D], the same in all stages."""
        rows = stages.total(module.embedding.part(token_N, stages.index() * self.layout.rows))
        # A token outside the vocabulary gives NaN: a wrong tokenizer shows in the first loss.
        known = (token_N >= 0) & (token_N < self.config.vocab_size)
        return jnp.where(known[:, None], rows, jnp.nan).astype(self.config.compute_dtype)

    def _through(self, module: Transformer, x_NxD: Array, batch: int, length: int) -> Array:
        """Sends `batch` sequences of this length through the stage's blocks."""
        layout, real_L = self.layout, None
        if layout.blocks * layout.stages > self.config.layers:
            block_L = stages.index() * layout.blocks + jnp.arange(layout.blocks)
            real_L = block_L < self.config.layers
        return module.through(x_NxD, module.context(batch, jnp.arange(length)), real_L)

    def _part_logits(self, module: Transformer, hidden_NxD: Array) -> Array:
        """Logits [N, C] of this stage's tokens, compute dtype, of the last stage's activations."""
        last = stages.index() == self.layout.stages - 1
        hidden = jnp.where(last, hidden_NxD, jnp.zeros_like(hidden_NxD))
        shared = stages.total(hidden).astype(hidden_NxD.dtype)
        logits_NxC = module.leave(shared)
        rows = self.layout.rows
        if rows * self.layout.stages == self.config.vocab_size:
            return logits_NxC
        token_C = stages.index() * rows + jnp.arange(rows)
        return jnp.where((token_C < self.config.vocab_size)[None], logits_NxC, _HIDDEN)

    def _part_loss(self, module: Transformer, hidden_NxD: Array, target_N: Array, weight_N: Array):
        """(loss, aux) of `loss.weighted_loss`, the same in all stages."""
        logits_NxC = self._part_logits(module, hidden_NxD)
        first = stages.index() * self.layout.rows
        reductions = {"total": stages.total, "largest": stages.largest}
        found = scores(logits_NxC, target_N, first, **reductions)
        return weighted_loss(found, weight_N, self.config.z_loss)

    def _stage_loss(self, params, tokens_MxBxT, weight_MxBxT, key_data):
        """GPipe, forward; the backward pass is left to differentiation."""
        module = self._bind(params)
        target_MxN = tokens_MxBxT[:, :, 1:].reshape(self.microbatches, -1)
        weight_MxN = weight_MxBxT.reshape(self.microbatches, -1)
        if self.routed:
            labels = pipeline_paths.label(target_MxN, weight_MxN)
            hand_on = functools.partial(self.paths.hand_on, row_T=self.paths.agreed(key_data))
            hidden_MxNxD, came = self._hidden(module, tokens_MxBxT[:, :, :-1], labels, hand_on)
            target_MxN, weight_MxN = pipeline_paths.read_labels(came, self.layout.stages)
        else:
            hidden_MxNxD, _ = self._hidden(module, tokens_MxBxT[:, :, :-1])
        one = functools.partial(self._part_loss, module)
        if self.config.remat == "full":
            one = jax.checkpoint(one)

        def add(sums, microbatch):
            return jax.tree.map(jnp.add, sums, one(*microbatch)), None

        zero = jnp.float32(0.0)
        sums = zero, {"ce": zero, "accuracy": zero}
        return jax.lax.scan(add, sums, (hidden_MxNxD, target_MxN, weight_MxN))[0]

    def _stage_gradients(self, specs, params, tokens_MxBxT, weight_MxBxT):
        """1F1B: ((loss, aux), gradients of this stage's part); `specs` of the whole leaves."""
        _, batch, length = tokens_MxBxT.shape
        target_MxN = tokens_MxBxT[:, :, 1:].reshape(self.microbatches, -1)
        weight_MxN = weight_MxBxT.reshape(self.microbatches, -1)
        run = OneFOneB(
            enter=lambda p, m: self._enter(self._bind(p), tokens_MxBxT[m, :, :-1].reshape(-1)),
            apply=lambda p, x: self._through(self._bind(p), x, batch, length - 1),
            leave=lambda p, y, m: self._part_loss(self._bind(p), y, target_MxN[m], weight_MxN[m]),
            stages=self.layout.stages,
            microbatches=self.microbatches,
        )
        sums, grads = run(params)

        def shared(gradient, spec):
            """Of a leaf that every stage has whole each has found a share."""
            return stages.total(gradient) if stages.stage_axis(spec) is None else gradient

        return sums, jax.tree.map(shared, grads, specs)

    def _stage_logits(self, params, tokens_MxBxT):
        module = self._bind(params)
        hidden_MxNxD, _ = self._hidden(module, tokens_MxBxT)
        return jax.lax.map(lambda hidden: self._part_logits(module, hidden), hidden_MxNxD)

    def _hidden(self, module, tokens_MxBxT, labels_M=None, hand_on=None):
        """Activations after the last block, [M, N, D], and labels; of use in the last stage."""
        count, batch, length = tokens_MxBxT.shape
        x_MxNxD = self._enter(module, tokens_MxBxT.reshape(-1)).reshape(count, batch * length, -1)

        def apply(held):
            x, labels = held
            return self._through(module, x, batch, length), labels

        return stages.gpipe(apply, (x_MxNxD, labels_M), self.layout.stages, hand_on)


# -- what is refused ---------------------------------------------------------------------------


def pipeline_problems(config: Any, count: int, microbatches: int) -> list[str]:
    """Why a model of `config` cannot run in `count` stages, with its fix."""
    found = []
    if config.layer_loop != "scan":
        found.append(
            f"layer_loop={config.layer_loop!r}: pipeline stages need layer_loop='scan', whose "
            "blocks are stacked"
        )
    if count > config.layers:
        found.append(f"{count} stages for {config.layers} blocks: use at most {config.layers}")
    if microbatches < 1:
        found.append(f"microbatches={microbatches}: at least 1 is needed")
    return found


def schedule_problems(schedule: str, routed: bool) -> list[str]:
    """A schedule that is unknown, or does not fit random routing."""
    if schedule not in typing.get_args(Schedule):
        return [f"schedule {schedule!r} is unknown: use {' or '.join(typing.get_args(Schedule))}"]
    if routed and schedule != "gpipe":
        return [
            f"random routing with {schedule}: its stages go back through different microbatches at "
            "the same time, and gradients would have to go different ways; use gpipe"
        ]
    return []


# -- helpers -----------------------------------------------------------------------------------


def _with_gradients(loss_fn, gradients_fn):
    """A loss whose gradients a function of its own works out; those of its aux are taken as 0."""

    @jax.custom_vjp
    def run(params, tokens, weight):
        return loss_fn(params, tokens, weight, None)

    def backward(grads, cotangent):
        return jax.tree.map(lambda g: g * cotangent[0], grads), None, None

    run.defvjp(gradients_fn, backward)
    return run


@functools.partial(jax.jit, static_argnums=1)
def _drawn(key_data_N: Array, paths: Paths) -> Array:
    return jax.vmap(paths.draw)(key_data_N)


def _microbatches(x: Array, count: int) -> Array:
    """[B, ...] -> [M, B / M, ...]: row i goes to microbatch i mod M."""
    if x.shape[0] % count:
        raise ValueError(
            f"a batch of {x.shape[0]} does not divide into {count} microbatches: use a multiple of "
            f"{count}, or fewer microbatches"
        )
    return x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1)
