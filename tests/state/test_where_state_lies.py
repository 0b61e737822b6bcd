"""Regions of several devices: the state lies with the parameters, and anchors are the same bits."""

import jax
import numpy as np
import optax
import pytest
from engine.dilocox_cases import codec, train

import lowcomm_jax as lc

R, DEVICES = 2, 2
SHAPES = {"across": (32, 128), "down": (128, 32)}
SPECS = {"across": jax.P(None, "fsdp"), "down": jax.P("fsdp")}


def loss_fn(params, batch, rng):
    del rng
    return sum(((params[k] - batch[k][0]) ** 2).sum() for k in SHAPES)


def test_every_leaf_of_the_state_is_cut_over_fsdp():
    """Anchor, both optimizers' state, residuals, snapshots and what is in flight: a half each."""
    outer, wire = lc.outer.nesterov(0.4, 0.9), lc.compression.make("stat4", error_feedback=0.9)
    method = lc.methods.streaming_diloco(2, 1, 1, 0.3, outer=outer, codec=wire)
    mesh = lc.make_mesh(region=R, fsdp=DEVICES, devices=jax.devices()[: R * DEVICES])
    specs = lambda name, leaf: SPECS[name]  # noqa: E731
    engine = lc.Engine(loss_fn, optax.adam(0.01), method, R, mesh=mesh, specs=specs)
    rng = np.random.default_rng(0)
    draw = lambda *lead: {k: rng.normal(size=(*lead, *s)).astype("f4") for k, s in SHAPES.items()}  # noqa: E731
    state, seen = engine.init(draw()), set()
    for _ in range(4):
        state, _ = engine.step(state, draw(R, DEVICES))
    assert state.in_flight
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if isinstance(leaf, jax.Array) and leaf.size >= 32 * 128 // 2:  # codebooks are whole
            where = jax.tree_util.keystr(path)
            assert "fsdp" in str(leaf.sharding.spec), (where, leaf.sharding)
            regions = R if leaf.shape[0] == R else 1
            assert leaf.addressable_shards[0].data.size * DEVICES * regions == leaf.size, where
            seen.add(where.split("[")[0].split(".")[1])
    assert seen >= {"inner", "anchor", "outer", "codec", "in_flight"}


@pytest.mark.parametrize("name", ["low_rank", "dct_topk", "int4_two_shot"])
def test_owners_adopt_what_the_others_decode(name):
    """The anchor of every region is the same bits, a region's own payload decoded like theirs."""
    if name == "low_rank":
        method = lc.methods.dilocox(3, codec(), 2, delay=0, adaptive=False)
    elif name == "dct_topk":
        method = lc.methods.decoupled_momentum(3, k=3)
    else:
        wire = lc.compression.make("int4", reduce="two_shot", error_feedback=0.9)
        method = lc.methods.diloco(3, codec=wire)
    state, seen, _ = train(method, R, 9, devices=R)
    for key, leaf in state.anchor.items():
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(copies) == R and copies[0].shape == leaf.shape
        np.testing.assert_array_equal(copies[0], copies[1], err_msg=key)
        assert np.abs(copies[0] - seen[0][0][key]).max() > 1e-3
