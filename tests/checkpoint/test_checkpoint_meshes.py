"""A checkpoint saved on one mesh is restored on another: the same values, other shardings."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from checkpoint.checkpoint_cases import (
    assert_same,
    bf16_params,
    make_engine,
    one_device,
    train,
    values,
)
from jax.sharding import PartitionSpec as P

import lowcomm_jax as lc
from lowcomm_jax import compression
from lowcomm_jax.checkpoint import Checkpoints
from lowcomm_jax.checkpoint.target import _fitting

NAME = "streaming"
REGIONS = 4


def eight_devices():
    return lc.make_mesh(region=4, fsdp=2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two fragments in flight on region 4 x fsdp 2; (directory, state, values, engine)."""
    directory = tmp_path_factory.mktemp("mesh")
    engine = make_engine(NAME, REGIONS, eight_devices())
    state = train(engine, engine.init(bf16_params()), range(1, 12))
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(state, extra={}, config={}, method=engine.method)
    assert len(state.in_flight) == 2
    return directory, state, values(state), engine


def restore(directory, engine):
    with Checkpoints(directory) as checkpoints:
        return checkpoints.restore(engine, bf16_params()).state


def test_the_same_mesh_in_the_same_shardings_goes_on_alike(saved):
    directory, state, before, engine = saved
    found = restore(directory, engine)
    assert_same(values(found), before)
    for restored, leaf in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        if isinstance(leaf, jax.Array):
            assert restored.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)


def test_one_device(saved):
    directory, _, before, _ = saved
    engine = make_engine(NAME, REGIONS, one_device())
    found = restore(directory, engine)
    assert_same(values(found), before)
    assert found.inner.params["a"].sharding.device_set == {jax.devices()[0]}
    batches = oracle.make_batches(steps=12, regions=REGIONS)
    state, _ = engine.step(found, oracle.step_batch(batches, 12))
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in state.anchor.values())


def test_two_regions_a_slot(saved):
    directory, _, before, _ = saved
    found = restore(directory, make_engine(NAME, REGIONS, lc.make_mesh(region=2, fsdp=1)))
    assert_same(values(found), before)
    assert found.inner.params["a"].sharding.num_devices == 2


def test_an_axis_that_does_not_divide_is_left_out():
    mesh = lc.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    spec = [["fsdp", "tensor"], ["fsdp", "tensor"], "fsdp", "tensor", None]
    found = _fitting(spec, (8, 6, 6, 3, 5), mesh)
    assert found == P(("fsdp", "tensor"), None, "fsdp", None, None)


CODECS = {
    # Of `s` a device of four has no whole row of chunks, and codes strips.
    "topk": compression.make("topk", k=16, error_feedback=0.9, stacked=("s",)),
    "fp32": None,
    "int4_affine": compression.make("int4_affine", error_feedback=0.9, stacked=("s",)),
    "stat4": compression.make("stat4", stacked=("s",)),
    "sign": compression.make("sign_ef", stacked=("s",)),
    "low_rank": compression.make("low_rank_int4", stacked=("s",)),
    "random_k": compression.make("random_k", stacked=("s",)),
    "dct": compression.make("dct_topk", k=4, error_feedback=0.9, stacked=("s",)),
}


def loss(params, batch, rng):
    del rng
    x = batch["x"] @ params["w"]
    for layer in params["s"]:
        x = jnp.tanh(x @ layer)[:, :64]
    return jnp.mean((x.sum(-1) - 1.0) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", CODECS)
def test_a_payload_in_flight_lands_on_another_mesh_as_on_its_own(name, tmp_path):
    draw = np.random.default_rng(0)

    def array(*shape):
        return jnp.asarray(draw.normal(size=shape) * 0.1, jnp.float32)

    params = {"w": array(96, 64), "s": array(3, 64, 80)}
    batches = [{"x": array(2, 4, 96)} for _ in range(3)]
    specs = {"w": P("fsdp"), "s": P(None, "fsdp")}

    def engine(devices):
        return lc.Engine(
            loss,
            optax.sgd(0.05),
            lc.methods.streaming_diloco(2, 1, 1, 0.5, codec=CODECS[name]),
            2,
            mesh=lc.make_mesh(fsdp=devices, devices=jax.devices()[:devices]),
            specs=lambda path, leaf: specs[path],
            stacked=("s",),
        )

    here, there = engine(1), engine(4)
    state = here.init(params)
    for batch in batches[:2]:
        state, _ = here.step(state, batch)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, extra={}, config={}, method=here.method)
        moved = checkpoints.restore(there, params).state
    before = values(state)
    assert len(moved.in_flight) == 1
    stayed, moved = (values(e.step(s, batches[2])[0]) for e, s in ((here, state), (there, moved)))
    for leaf in ("anchor/w", "anchor/s"):
        assert np.abs(stayed[leaf] - before[leaf]).max() > 1e-4  # it has landed
        np.testing.assert_allclose(moved[leaf], stayed[leaf], rtol=0, atol=1e-6)
