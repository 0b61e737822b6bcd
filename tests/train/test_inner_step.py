"""One region's inner step: what goes on, and what stands still, when a step is skipped."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from params.test_roles import NORM, norm_loss, norm_roles
from params.tiny_runs import R, engine, scalars, train

import lowcomm_jax as lc
from lowcomm_jax.train.inner_step import part_key

BAD = 1


def key_of(seed, region, step):
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), region), step)


def noisy_loss(params, batch, rng):
    drawn = jax.random.uniform(rng)
    return (params["w"] * batch["x"]).mean() * (1 + drawn), {"drawn": drawn}


def test_a_skipped_step_uses_up_its_key_and_nothing_else():
    """Its key would be drawn again by the next step, and every later step be off by one."""
    table = np.arange(1.0, 1 + 4 * R).reshape(4, R)
    table[1, BAD] = np.nan
    one = engine(noisy_loss, lc.methods.diloco(10), seed=5)
    state = one.init({"w": np.float32(1.0)})
    drawn, values = [], []
    for batch in scalars(table):
        state, metrics = one.step(state, batch)
        drawn.append(np.asarray(metrics["drawn"]))
        values.append(np.asarray(state.inner.params["w"]))
    assert np.asarray(state.inner.step).tolist() == [4] * R
    keys = [[key_of(5, r, t) for r in range(R)] for t in range(4)]
    expected = [[float(jax.random.uniform(key)) for key in row] for row in keys]
    np.testing.assert_allclose(drawn, expected, rtol=1e-6)
    assert values[1][BAD] == values[0][BAD] and values[2][BAD] != values[1][BAD]
    assert np.asarray(state.inner.tokens)[:, 0].tolist() == [4, 3, 4]


@pytest.mark.parametrize("name", ["diloco", "ddp"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_region_step_and_microbatch_draws_from_a_key_of_its_own(name, accumulate):
    """With one key for several of them dropout would drop the same values in all."""
    method = {"diloco": lambda: lc.methods.diloco(10), "ddp": lc.methods.ddp}[name]()
    one = engine(noisy_loss, method, seed=5, accumulate=accumulate)
    state = one.init({"w": np.float32(1.0)})
    for t in range(2):
        state, metrics = one.step(state, {"x": np.ones((R, 2), np.float32)})
        keys = [key_of(5, r, t) for r in range(R)]
        if accumulate == 2:
            parts = [[part_key(key, 0), part_key(key, 1)] for key in keys]
        else:
            parts = [[key] for key in keys]
        expected = [np.mean([jax.random.uniform(key) for key in own]) for own in parts]
        np.testing.assert_allclose(metrics["drawn"], expected, rtol=1e-6)


def test_a_skipped_step_leaves_buffers_as_they_were():
    """Its batch would make running statistics NaN for good."""
    table = np.arange(1.0, 1 + 3 * R).reshape(3, R)
    table[1, BAD] = np.nan
    one = engine(norm_loss, lc.methods.diloco(10), roles=norm_roles("local"))
    buffers = [train(one, NORM, scalars(table[:n])).inner.buffers for n in (1, 2, 3)]
    means = np.array([found["mean"] for found in buffers])
    assert means[1][BAD] == means[0][BAD] and np.isfinite(means).all()
    np.testing.assert_allclose(means[2], 0.7 * means[1] + 0.3 * table[2], rtol=1e-6)
    assert [found["seen"].tolist() for found in buffers] == [[4] * R, [5, 4, 5], [6, 5, 6]]


@pytest.mark.parametrize("bad", [False, True], ids=["absent", "nan"])
def test_a_region_that_makes_no_step_of_ddp_keeps_its_own_state(bad):
    """A batch that is not finite would make running statistics NaN for good."""
    table = np.arange(1.0, 1 + 3 * R).reshape(3, R)
    if bad:
        table[1, BAD] = np.nan
    one = engine(norm_loss, lc.methods.ddp(), roles=norm_roles("local"))
    present = None if bad else lambda t: [t != 2 or r != BAD for r in range(R)]
    buffers = [train(one, NORM, scalars(table[:n]), present).inner.buffers for n in (1, 2)]
    assert buffers[1]["mean"][BAD] == buffers[0]["mean"][BAD]
    assert buffers[1]["seen"].tolist() == [5, 4, 5]


def test_buffers_go_from_one_microbatch_to_the_next():
    batch = {"x": np.arange(1.0, 1 + 2 * R, dtype=np.float32).reshape(R, 2)}
    one = engine(norm_loss, lc.methods.diloco(10), roles=norm_roles("local"), accumulate=2)
    state, mean = one.init(NORM), np.full(R, 0.2)
    for t in (1, 2):
        state, _ = one.step(state, batch)
        for part in batch["x"].T:
            mean = 0.7 * mean + 0.3 * part
        np.testing.assert_allclose(state.inner.buffers["mean"], mean, rtol=1e-6)
        assert state.inner.buffers["seen"].tolist() == [3 + 2 * t] * R


@pytest.mark.parametrize("method", [lc.methods.diloco(10), lc.methods.ddp()], ids=["diloco", "ddp"])
@pytest.mark.parametrize("dtype,gradients", [(np.float16, [7800]), (jnp.bfloat16, [16, *[1] * 8])])
def test_the_norm_of_gradients_that_are_not_fp32(method, dtype, gradients):
    """In their own dtype the square is infinite (float16), or 256 + 1 is 256 (bfloat16)."""

    def loss_fn(params, batch, rng):
        del rng
        return sum(x * (g * batch["x"].mean()).astype(x.dtype) for x, g in zip(params, gradients))

    one = engine(loss_fn, method, inner=optax.sgd(1e-4))
    state = one.init([np.zeros((), dtype)] * len(gradients))
    state, metrics = one.step(state, {"x": np.ones((R, 1), np.float32)})
    np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(gradients), rtol=1e-3)
    assert (np.asarray(lc.region_params(state)[0], np.float32) != 0).all()


@pytest.mark.parametrize("replicas", ["map", "vmap"])
def test_the_step_is_traced_once(replicas):
    """A second trace of a large model takes as long as the first, at every start."""
    traced = []

    def loss(params, batch, rng):
        traced.append(rng)
        return noisy_loss(params, batch, rng)

    one = engine(loss, lc.methods.diloco(10), replicas=replicas)
    train(one, {"w": np.float32(1.0)}, scalars(np.ones((3, R))))
    assert len(traced) == 1
