"""Evaluate the anchor, the regions' mean and single regions on fixed validation sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import lowcomm_jax as lc
from lowcomm_jax.data import EvalData, per_document
from lowcomm_jax.mesh.arrays import place
from lowcomm_jax.mesh.regions import REGION
from lowcomm_jax.models import Trainable
from lowcomm_jax.state.train_state import TrainState

# Of so many validation sequences the few are chosen; it bounds time and memory on large corpora.
_LOOKED_AT = 1 << 16


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Losses in nats per token.

    Attributes:
      anchor, mean: loss of the anchor and of the mean of the regions' weights.
      regions: loss of every region's own weights; empty when not asked for.
      anchor_variance: of the anchors over the regions (`lowcomm_jax.consensus`); 0 when
        they share one.
      document_sum: summed loss of the anchor per document of the evaluation set.
    """

    anchor: float
    mean: float
    regions: tuple[float, ...]
    anchor_variance: float
    document_sum: np.ndarray


class Evaluator:
    """Evaluates states of one run, batch by batch; compiled once.

    Attributes:
      document, count: the documents of the evaluation set, and the targets each has in it.
    """

    def __init__(
        self,
        model: Trainable,
        data: EvalData,
        mesh: jax.sharding.Mesh,
        *,
        sequences: int,
        batch: int,
        per_region: bool,
    ):
        chosen = spread_sequences(data, sequences, batch)
        self._document = chosen.pop("document")
        if not hasattr(model, "logits"):
            chosen["place"] = _place(self._document)
        places = max(1, 1 + int(chosen["place"].max())) if "place" in chosen else 0
        by_document = per_document(np.zeros(self._document.shape), self._document)
        self.document, self.count = by_document["document"], by_document["count"]
        slots = (REGION, "fsdp")
        devices = mesh.shape[REGION] * mesh.shape["fsdp"]
        spec = P(None, slots) if batch % devices == 0 else P()
        self._batches = place(chosen, NamedSharding(mesh, spec))
        everywhere = NamedSharding(mesh, P())  # so that every process can read them
        self._weights = jax.jit(lambda state: _weights(state, per_region))
        self._losses = jax.jit(
            lambda weights, batches, i: _losses(model, places, weights, batches, i),
            out_shardings=everywhere,
        )

    def __call__(
        self, state: TrainState, leave: Callable[[], bool] = lambda: False
    ) -> Evaluation | None:
        """Evaluate; waits for the device.

        Args:
          leave: asked before every batch; None is returned once it says yes.
        """
        weights, variance = self._weights(_weights_only(state))
        found: list[jax.Array] = []
        for i in range(len(self._document)):
            if leave():
                return None
            found.append(self._losses(weights, self._batches, np.int32(i)))
            jax.block_until_ready(found[-2:][0])  # one waits behind the one that is under way
        losses_MxNxBxT = np.stack([np.asarray(x) for x in found], axis=1)
        kept = self._document >= 0
        total = losses_MxNxBxT[:, kept].astype(np.float64).sum(axis=1) / int(self.count.sum())
        sums = per_document(losses_MxNxBxT[0], self._document)["sum"]
        anchor, mean, *regions = total.tolist()
        return Evaluation(anchor, mean, tuple(regions), float(variance), sums)

    def compile(self, state: TrainState) -> None:
        """Compile what an evaluation of such a state needs, and run none of it.

        `jax.jit` finds it at the first call.
        """
        made = self._weights.lower(_weights_only(state)).compile()
        like = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            made.out_info,
            made.output_shardings,
        )
        weights, _ = like
        self._losses.lower(weights, self._batches, np.int32(0)).compile()


def spread_sequences(data: EvalData, sequences: int, batch: int) -> dict[str, np.ndarray]:
    """Take sequences at equal distances, so that a few of them are from many documents.

    Returns:
      {"tokens": int32 [n, B, T+1], "mask": float32 [n, B, T], "document": int32 [n, B, T]}. The
      last batch is filled up with sequences of mask 0 and document -1.
    """
    block = min(len(data), _LOOKED_AT)
    every = data.batches(block, 1)
    count = min(sequences, block)
    take = np.arange(count) * block // count
    rows = -(-count // batch) * batch
    fill = {"tokens": 0, "mask": 0, "document": -1}
    out = {}
    for name, values in every.items():
        chosen = values[0][take]
        padding = np.full((rows - count, *chosen.shape[1:]), fill[name], chosen.dtype)
        out[name] = np.concatenate([chosen, padding]).reshape(-1, batch, *chosen.shape[1:])
    return out


def _weights_only(state: TrainState) -> TrainState:
    """The state without the parts whose structure changes, so that one compilation serves all."""
    return state.replace(
        outer=(), codec=(), landing=(), in_flight={}, inner=dataclasses.replace(state.inner, opt=())
    )


def _weights(state: TrainState, per_region: bool) -> tuple[Any, jax.Array]:
    """Parameters stacked `[M, ...]`: the anchor, the mean of regions, then the regions.

    Beside them the variance of the anchors.
    """
    regions = lc.region_params(state)
    stack = [lc.global_params(state), jax.tree.map(lambda x: x.mean(axis=0), regions)]
    weights = jax.tree.map(lambda a, b: jnp.stack([a, b.astype(a.dtype)]), *stack)
    if per_region:
        weights = jax.tree.map(
            lambda w, r: jnp.concatenate([w, r.astype(w.dtype)]), weights, regions
        )
    return weights, lc.consensus.variance(state)


def _place(document_nxBxT: np.ndarray) -> np.ndarray:
    """Numbers the documents of each sequence from 0, int32 `[n, B, T]`; -1 where there is none."""
    place = np.full(document_nxBxT.shape, -1, np.int32)
    for where in np.ndindex(document_nxBxT.shape[:2]):
        row_T = document_nxBxT[where]
        place[where][row_T >= 0] = np.unique(row_T[row_T >= 0], return_inverse=True)[1]
    return place


def _losses(model: Trainable, places: int, weights: Any, batches: Any, i: jax.Array) -> jax.Array:
    """Loss of every target of batch i, float32 `[M, B, T]`, one set of weights after the other."""
    batch = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), batches)
    return jax.lax.map(lambda params: _of_batch(model, places, params, batch), weights)


def _of_batch(model: Trainable, places: int, params: Any, batch: Any) -> jax.Array:
    """Loss of every target, float32 `[B, T]`; 0 where it does not count.

    Args:
      places: most documents of a sequence, for a model without logits. Its targets have the mean
        loss of their document in their sequence, so that sums over documents are its own.
    """
    if not places:
        logits = model.logits(params, batch["tokens"][:, :-1])
        ce = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
        return ce * batch["mask"]

    def of_document(tokens: jax.Array, mask_T: jax.Array) -> jax.Array:
        given = {"tokens": tokens[None], "mask": mask_T[None]}
        found = model.loss_fn(params, given, jax.random.key(0))
        loss, aux = found if isinstance(found, tuple) else (found, {})
        return jnp.where(mask_T > 0, aux.get("ce", loss), 0.0)

    def at_place(place: jax.Array) -> jax.Array:
        mask_BxT = batch["mask"] * (batch["place"] == place)
        return jax.vmap(of_document)(batch["tokens"], mask_BxT)

    return jax.lax.map(at_place, jnp.arange(places)).sum(axis=0)
