"""Parameters of any tree and any float type: modules, bare arrays, keys, bf16."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from params.tiny_runs import LR, R, X, engine, train

import lowcomm_jax as lc


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Linear:
    """What an Equinox module looks like: arrays, a static field, and a call."""

    weight: jax.Array
    bias: jax.Array
    name: str = dataclasses.field(metadata={"static": True}, default="linear")

    def __call__(self, x):
        return x * self.weight.sum() + self.bias


def module_loss(params, batch, rng):
    del rng
    return 0.5 * jnp.mean((params(batch["x"]) - 1.0) ** 2)


def by_hand(weight, bias, method_period=2):
    """Local SGD on module_loss: mean of parameters every period; returns (weight, bias)."""
    w = np.tile(np.asarray(weight, np.float64), (R, 1))
    b = np.full(R, float(bias))
    for t, batch in enumerate(X, 1):
        x = batch["x"][:, 0]
        residual = x * w.sum(axis=1) + b - 1.0
        w, b = w - LR * (residual * x)[:, None], b - LR * residual
        if t % method_period == 0:
            w[:], b[:] = w.mean(axis=0), b.mean()
    return w, b


def test_a_dataclass_with_a_static_field():
    module = Linear(np.array([0.3, -0.1], np.float32), np.float32(0.2), "head")
    state = train(engine(module_loss, lc.methods.local_sgd(2)), module, X)
    local = lc.region_params(state)
    w, b = by_hand([0.3, -0.1], 0.2)
    assert isinstance(local, Linear) and local.name == "head"
    np.testing.assert_allclose(local.weight, w, rtol=1e-5)
    np.testing.assert_allclose(local.bias, b, rtol=1e-5)


def test_a_callable_module_may_carry_the_roles():
    module = Linear(np.array([0.3, -0.1], np.float32), np.float32(0.2), "head")
    roles = Linear("frozen", "train", "head")
    one = engine(module_loss, lc.methods.local_sgd(2), roles=roles)
    assert list(one.init(module).anchor) == ["bias"]


def test_a_bare_array_and_nested_lists():
    def bare(params, batch, rng):
        return module_loss(Linear(params[:2], params[2]), batch, rng)

    def nested(params, batch, rng):
        return module_loss(Linear(params[0][0], params[1]), batch, rng)

    w, b = by_hand([0.3, -0.1], 0.2)
    weight, bias = np.array([0.3, -0.1], np.float32), np.float32(0.2)
    state = train(engine(bare, lc.methods.local_sgd(2)), np.append(weight, bias), X)
    local = lc.region_params(state)
    np.testing.assert_allclose(local, np.concatenate([w, b[:, None]], axis=1), rtol=1e-5)
    state = train(engine(nested, lc.methods.local_sgd(2)), [[weight], bias], X)
    local = lc.region_params(state)
    np.testing.assert_allclose(local[0][0], w, rtol=1e-5)
    np.testing.assert_allclose(local[1], b, rtol=1e-5)


def test_a_typed_key_among_the_parameters_stays():
    params = {"w": np.float32(0.4), "key": jax.random.key(7)}

    def loss(params, batch, rng):
        return 0.5 * jnp.mean((params["w"] * batch["x"] - 1.0) ** 2)

    state = train(engine(loss, lc.methods.diloco(2)), params, X)
    assert jax.random.key_data(lc.global_params(state)["key"]).tolist() == [0, 7]


# -- dtypes ---------------------------------------------------------------------------------------


def test_bf16_params_have_an_fp32_anchor():
    """The anchor keeps what bf16 would lose: 1 + 2^-6 / 3 lies between two bf16 numbers."""

    def loss(params, batch, rng):
        return jnp.sum(params["w"].astype(jnp.float32) * batch["x"])

    # Gradient x, rate LR: locals 1 - LR x must be exact in bf16: steps of 2^-7 below 2.
    move = np.array([[-(2.0**-6)], [0.0], [0.0]], np.float32) / LR
    one = engine(loss, lc.methods.local_sgd(1), optax.sgd(LR))
    state = train(one, {"w": jnp.ones(1, jnp.bfloat16)}, [{"x": move}])
    expected = np.float32(1 + 2.0**-6 / 3)
    anchor = state.anchor["w"]
    assert anchor.dtype == jnp.float32
    np.testing.assert_allclose(anchor[0], [expected], rtol=1e-6)
    assert float(anchor[0, 0]) != float(jnp.bfloat16(expected))
    assert lc.region_params(state)["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        np.asarray(lc.region_params(state)["w"], np.float32),
        np.full((R, 1), float(jnp.bfloat16(expected)), np.float32),
    )


@pytest.mark.parametrize("method", ["ddp", "streaming"])
def test_bf16_survives_every_kind_of_landing(method):
    made = {
        "ddp": lambda: lc.methods.ddp(),
        "streaming": lambda: lc.methods.streaming_diloco(3, 2, 1, 0.3),
    }[method]()
    module = Linear(jnp.array([0.3, -0.1], jnp.bfloat16), jnp.bfloat16(0.2))
    state = train(engine(module_loss, made, optax.adamw(0.01)), module, X)
    assert {x.dtype for x in state.inner.params.values()} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in state.anchor.values()} == {jnp.dtype(jnp.float32)}
