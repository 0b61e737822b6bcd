"""Batches of any number of microbatches: one batch's result, one compilation a microbatch size."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import oracle_runs
import pytest
from compilations import compilations
from oracle.jax_problem import loss_fn
from oracle_runs import one_device, started

import lowcomm_jax as lc
from lowcomm_jax.refusals import UNFIT, microbatch_problems
from lowcomm_jax.refused import refuse
from lowcomm_jax.train.batch_blocks import BlockStager

R = 2


def masked_loss(params, batch, rng):
    """Mean over the samples that count; a microbatch in which none does has no finite loss."""
    del rng
    flat = jnp.concatenate([jnp.ravel(params[key]) for key in sorted(params)])
    residual = batch["x"] @ flat - batch["y"]
    tokens = batch["mask"].sum()
    return 0.5 * (residual**2 * batch["mask"]).sum() / tokens, {"tokens": tokens}


def make(loss=loss_fn, method=None, **kwargs):
    method = lc.methods.diloco(3) if method is None else method
    return started(method, R, optax.adamw(0.03), loss, block=32, **kwargs)


@pytest.fixture(scope="module")
def plain():
    with jax.numpy_dtype_promotion("standard"):
        yield make()[0]


@pytest.fixture(scope="module")
def masked():
    with jax.numpy_dtype_promotion("standard"):
        yield make(masked_loss)[0]


def stream(sizes, seed=0):
    """One batch `[R, size, ...]` a step; steps of one size differ from each other."""
    steps = oracle_runs.stream(len(sizes), R, seed=seed, batch_size=max(sizes))
    return [{k: v[:, :n] for k, v in b.items()} for b, n in zip(steps, sizes, strict=True)]


def with_masks(batches):
    """Uneven masks: in region 1 the first four samples of every batch do not count."""
    rng = np.random.default_rng(5)
    masks = [(rng.random(b["y"].shape) < 0.6).astype(np.float32) for b in batches]
    for mask in masks:
        mask[1, :4], mask[:, -1] = 0.0, 1.0
    return [b | {"mask": m} for b, m in zip(batches, masks, strict=True)]


def close(state, other):
    def check(a, b):
        np.testing.assert_allclose(a, b, rtol=3e-5, atol=2e-6)

    jax.tree.map(check, state.inner, other.inner)
    jax.tree.map(check, state.anchor, other.anchor)
    jax.tree.map(check, state.outer, other.outer)


def test_accumulated_microbatches_equal_one_batch(masked):
    """Moments, tokens and anchors too, over two rounds, with masked samples weighing nothing."""
    batches = with_masks(stream([8] * 7))
    whole, logged = masked.run(masked.init(oracle.make_params()), batches)
    cut, history = masked.run(masked.init(oracle.make_params()), batches, microbatch=2)
    close(cut, whole)
    for name in ("loss", "tokens", "grad_norm"):
        np.testing.assert_allclose(history[name], logged[name], rtol=2e-5)
    assert np.isfinite(logged["loss"]).all() and logged["loss"].shape == (7, R)


def test_steps_equal_a_run_and_sizes_may_change(plain):
    sizes = [2, 2, 6, 4, 4, 4, 16, 2]
    fast, history = plain.run(plain.init(oracle.make_params()), stream(sizes), microbatch=2)
    slow = plain.init(oracle.make_params())
    for t, batch in enumerate(stream(sizes)):
        slow, metrics = plain.step(slow, batch, microbatch=2)
        np.testing.assert_array_equal(metrics["loss"], history["loss"][t])
        assert np.asarray(metrics["tokens"]).tolist() == [sizes[t]] * R
    jax.tree.map(np.testing.assert_array_equal, fast.inner, slow.inner)


def test_nothing_compiles_while_the_batch_grows_64_fold(plain):
    state, _ = plain.run(plain.init(oracle.make_params()), stream([1] * 3), microbatch=1)
    before = jax.tree.map(np.array, state)
    state = plain.warm(state, stream([3])[0], [1, 2])
    jax.tree.map(np.testing.assert_array_equal, state, before)  # warming up trains nothing
    plain.step(plain.init(oracle.make_params()), stream([1])[0], microbatch=1)
    plan = [(1, 1), (2, 2), (6, 2), (16, 2), (64, 2)]

    def grow():
        grown = state
        for b, m in plan:
            grown, history = plain.run(grown, stream([b] * 3), microbatch=m)
            assert history["tokens"].tolist() == [[float(b)] * R] * 3
        return plain.step(grown, stream([5])[0], microbatch=1)[0]

    grown = []
    assert compilations(lambda: grown.append(grow())) == 0
    counted = optax.tree.get(grown[0].inner.opt, "count")  # Adam's moments live through all of it
    assert counted.tolist() == grown[0].inner.step.tolist() == [3 + 3 * len(plan) + 1] * R
    cold = compilations(lambda: plain.run(grown[0], stream([3]), microbatch=3)[0].inner.step)
    assert cold > 0, "the counter sees nothing, so this test could not fail"


def test_regions_of_uneven_pace_cut_their_batches_too():
    """Region 1 steps half as often: it stands still in between, and warming up knows of it."""
    method = lc.methods.async_local_sgd(100, speeds=(2.0, 1.0), dynamic=False)
    engine, state = make(method=method)
    whole, logged = engine.run(state, stream([4] * 3))
    cut = engine.warm(engine.init(oracle.make_params()), stream([4])[0], [2])
    found = []
    batches = stream([4] * 3)
    assert compilations(lambda: found.append(engine.run(cut, batches, microbatch=2))) == 0
    state, history = found[0]
    close(state, whole)
    assert not history["active"].all()
    np.testing.assert_array_equal(history["active"], logged["active"])


def test_cut_batches_give_the_same_on_every_mesh(plain):
    """Regions apart and samples sharded inside a region."""
    batches = stream([8, 8, 2])
    expected, _ = plain.run(plain.init(oracle.make_params()), batches, microbatch=2)
    engine, state = make(mesh=lc.make_mesh(region=2, fsdp=2), replicas="vmap")
    state, _ = engine.run(state, batches, microbatch=2)
    close(state, expected)


REFUSED = {
    "microbatch=0": {"microbatch": 0},
    "multiple of microbatch=3": {"microbatch": 3},
}


def test_refusals(plain):
    state = plain.init(oracle.make_params())
    for part, settings in REFUSED.items():
        with pytest.raises(ValueError) as error:
            plain.run(state, stream([4]), **settings)
        assert part in str(error.value)


def test_refusals_of_the_engine():
    """Before a state is looked at: all at once."""

    def message(microbatch=2, **kwargs):
        engine = lc.Engine(loss_fn, optax.sgd(0.1), regions=R, **kwargs)
        with pytest.raises(ValueError) as error:
            refuse(UNFIT, microbatch_problems(engine.setup, [microbatch]))
        return str(error.value)

    assert "ddp exchanges a gradient at every step" in message(
        method=lc.methods.ddp(), mesh=one_device()
    )
    network = {"regions": 2, "bandwidth_gbps": 1.0}
    fixed = {"mesh": lc.make_mesh(fsdp=2), "accumulate": 2, "network": network}
    both = message(3, method=lc.methods.diloco(3), **fixed)
    for part in ("microbatch=3 does not divide over fsdp=2", "accumulate=2 cuts", "network: its"):
        assert part in both
    with pytest.raises(ValueError, match="is 4 microbatches of 1, more than the 2"):
        BlockStager(stream([4]), 2, 1).take(1)
