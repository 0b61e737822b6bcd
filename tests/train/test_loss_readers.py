"""Inner optimizers that read the loss: each region's own one, or one line that refuses them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm_jax as lc

R, PERIOD, STEPS = 2, 3, 9
PARAMS = {"w": np.float32([0.4, -1.0, 0.3])}
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(STEPS, R, 4, 3)).astype(np.float32)
Y = (X @ np.float32([1.0, -2.0, 3.0])) * np.float32([1.0, 1.3])[:, None]

OPTIMIZERS = {
    "polyak": lambda: optax.polyak_sgd(max_learning_rate=0.3),
    "plateau": lambda: optax.chain(
        optax.sgd(0.2), optax.contrib.reduce_on_plateau(0.5, patience=1, rtol=0.1)
    ),
    "momo": lambda: optax.contrib.momo(0.2),
    "masked": lambda: optax.masked(optax.polyak_sgd(max_learning_rate=0.3), {"w": True}),
}


def loss_fn(params, batch, rng):
    del rng
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def engine(inner, method=None, **settings):
    mesh = lc.make_mesh(region=R)
    return lc.Engine(
        loss_fn, inner, method or lc.methods.local_sgd(PERIOD), R, mesh=mesh, **settings
    )


def by_hand(inner):
    """Plain Optax in every region; the mean of the parameters every `PERIOD` steps."""
    params_R = [jax.tree.map(jnp.asarray, PARAMS) for _ in range(R)]
    states_R = [inner.init(PARAMS) for _ in range(R)]
    losses = []
    for t in range(STEPS):
        for r in range(R):
            batch = {"x": X[t, r], "y": Y[t, r]}
            value, grads = jax.value_and_grad(loss_fn)(params_R[r], batch, None)
            updates, states_R[r] = inner.update(grads, states_R[r], params_R[r], value=value)
            params_R[r] = optax.apply_updates(params_R[r], updates)
            losses.append(float(value))
        if (t + 1) % PERIOD == 0:
            params_R = [jax.tree.map(lambda *x: sum(x) / R, *params_R)] * R
    return np.stack([p["w"] for p in params_R]), np.reshape(losses, (STEPS, R)), states_R


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_region_reads_its_own_loss(name, accumulate):
    one = engine(OPTIMIZERS[name](), accumulate=accumulate)
    batches = [{"x": x, "y": y} for x, y in zip(X, Y)]
    state, history = one.run(one.init(PARAMS), batches)
    expected, losses, states_R = by_hand(OPTIMIZERS[name]())
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-4)
    np.testing.assert_allclose(lc.region_params(state)["w"], expected, rtol=1e-4)
    if name == "plateau":
        scales = np.array([float(s[1].scale) for s in states_R])
        np.testing.assert_allclose(state.inner.opt[1].scale, scales)
        best = np.array([float(s[1].best_value) for s in states_R])
        np.testing.assert_allclose(state.inner.opt[1].best_value, best, rtol=1e-4)
        assert scales.max() < 1 and best[0] != best[1]  # each follows its own losses


def test_an_optimizer_that_takes_other_keywords_gets_none_that_it_refuses():
    sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05))
    one = engine(sam)
    state, _ = one.step(one.init(PARAMS), {"x": X[0], "y": Y[0]})
    assert np.isfinite(lc.region_params(state)["w"]).all()


def test_a_transform_to_which_the_loss_is_free_gets_it():
    seen = {}

    def update(updates, state, params=None, *, value=None, **rest):
        del params, rest
        seen["value"] = value
        return updates, state

    free = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    one = engine(optax.chain(free, optax.sgd(0.1)))
    one.step(one.init(PARAMS), {"x": X[0], "y": Y[0]})
    assert seen["value"].shape == () and seen["value"].dtype == jnp.float32


@pytest.mark.parametrize("method", [lc.methods.ddp, lc.methods.demo])
def test_gradient_exchange_has_no_loss_of_all_regions(method):
    with pytest.raises(ValueError) as error:
        engine(optax.polyak_sgd(), method()).init(PARAMS)
    _, line = str(error.value).splitlines()
    assert line.startswith("- the inner optimizer's update needs value, ")
    assert "exchange gradients, no losses" in line and "use an optimizer that needs" in line


@pytest.mark.parametrize("method", [lambda: lc.methods.diloco(2), lc.methods.ddp])
def test_a_line_search_is_refused_with_what_it_needs(method):
    with pytest.raises(ValueError) as error:
        engine(optax.lbfgs(), method()).init(PARAMS)
    _, line = str(error.value).splitlines()
    assert "value_fn" in line and "use an optimizer without a line search" in line


def test_a_wrapper_that_keeps_the_loss_to_itself_is_refused():
    inner = optax.MultiSteps(optax.polyak_sgd(), 2).gradient_transformation()
    with pytest.raises(
        ValueError, match="needs value, and a wrapper around it does not hand it on"
    ):
        engine(inner).init(PARAMS)
