"""A stack coded layer by layer gives what the codec gives of the whole stack."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm_jax import compression
from lowcomm_jax.compression import by_layer as large
from lowcomm_jax.compression.by_layer import ByLayer, by_layer
from lowcomm_jax.compression.registry import make_matrix
from lowcomm_jax.compression.row_sharding import RowCut

APART = ["fp32", "bf16", "int8", "int4", "e3m0", "stat8", "stat2", "sign", "topk", "low_rank"]
SHAPE = (3, 64, 128)


def stack(seed):
    return jax.random.normal(jax.random.key(seed), SHAPE)


@pytest.mark.parametrize("name", APART)
def test_layers_are_coded_apart(name):
    codec = make_matrix(name)
    assert codec.layers_apart
    state = codec.init(SHAPE, 7)
    for seed in (1, 2):  # the second round starts from a state
        whole = jax.jit(codec.encode)(stack(seed), state)
        parts = jax.jit(ByLayer(codec).encode)(stack(seed), state)
        same(parts, whole)
        same(
            *(jax.jit(c.decode, static_argnums=1)(whole[0], SHAPE) for c in (ByLayer(codec), codec))
        )
        state = whole[1]


@pytest.mark.parametrize("name", APART)
def test_the_mean_is_the_same(name):
    codec = make_matrix(name)
    sent = [codec.encode(stack(seed), codec.init(SHAPE, 7))[0] for seed in (1, 2, 3)]
    payload_R = jax.tree.map(lambda *x: jnp.stack(x), *sent)
    weight_R = jnp.asarray([1.0, 0.0, 3.0])
    run = (jax.jit(c.aggregate, static_argnums=2) for c in (ByLayer(codec), codec))
    same(*(aggregate(payload_R, weight_R, SHAPE) for aggregate in run))


def test_the_mean_rank_is_that_of_all_layers():
    """Layers of rank 1, 2 and 4: the mean tells them from their largest and smallest."""
    codec = make_matrix("low_rank", rank=4)
    rng, layers = np.random.default_rng(0), []
    for rank in (1, 2, 4):
        p, q = (np.linalg.qr(rng.normal(size=(n, rank)))[0] for n in SHAPE[1:])
        layers.append(p @ q.T)
    x = jnp.asarray(np.stack(layers), jnp.float32)
    payload, state = codec.encode(x, codec.init(SHAPE, 7))
    payload, _ = codec.encode(x, state)
    one = jax.tree.map(lambda leaf: leaf[None], payload)
    for found in (codec, ByLayer(codec)):
        rank = found.mean_rank(one, jnp.ones(1), SHAPE, 0.99)
        np.testing.assert_allclose(rank, 7 / 3, rtol=0.05)


def same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), one, other)


def test_codecs_that_draw_for_all_layers_at_once_are_not():
    assert not make_matrix("random_k").layers_apart


def test_only_large_stacks_are_coded_by_layer(monkeypatch):
    codec = make_matrix("int8")
    assert by_layer(codec, SHAPE, RowCut()) is codec
    monkeypatch.setattr(large, "LARGEST", 4 * 3 * 64 * 128 - 1)
    assert by_layer(codec, SHAPE, RowCut()) == ByLayer(codec)
    assert by_layer(codec, (1, 3 * 64, 128), RowCut()) is codec
    random = make_matrix("random_k")
    assert by_layer(random, SHAPE, RowCut()) is random


def test_a_tree_with_large_leaves_round_trips_by_layer(monkeypatch):
    tree = {"w": stack(1), "b": jnp.ones((5,))}
    codec = compression.error_feedback(compression.make("low_rank", stacked=("w",), rank=8))
    state = codec.init(tree)
    plain = codec.encode(tree, state)
    monkeypatch.setattr(large, "LARGEST", 1)
    found = codec.encode(tree, state)
    same(found, plain)
    same(codec.decode(found[0], tree), codec.decode(plain[0], tree))


@pytest.mark.parametrize("accepted", [True, False])
def test_a_residual_is_written_layer_by_layer_where_the_contribution_counts(accepted, monkeypatch):
    tree = {"w": stack(1), "b": jnp.ones((5,))}
    codec = compression.error_feedback(compression.make("int4", stacked=("w",)), 0.9)
    _, state = codec.encode(tree, codec.init(tree))
    tree = {"w": stack(2), "b": jnp.zeros((5,))}
    payload, new = codec.encode(tree, state)
    kept = new if accepted else state
    run = jax.jit(codec.encode_if, donate_argnums=2)
    donated = jax.tree.map(jnp.copy, state)
    same(run(accepted, tree, donated), (payload, kept))
    monkeypatch.setattr(large, "LARGEST", 1)
    run = jax.jit(lambda *args: codec.encode_if(*args), donate_argnums=2)
    same(run(accepted, tree, jax.tree.map(jnp.copy, state)), (payload, kept))
