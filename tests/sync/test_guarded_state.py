"""State that goes wrong silently: residuals, token counts, optimizer counts, values made in flight.

The loss is linear, so that every number can be worked out by hand: a region's gradient is what its
batch says, whatever its parameters are.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from params.tiny_runs import LR, R, engine

import lowcomm_jax as lc

BAD = 1
START = {"a": np.float32([1.0, -2.0, 0.5]), "b": np.float32([0.3, 4.0])}


def linear_loss(params, batch, rng):
    sums = jax.tree.map(lambda p, g: (p * g.mean(axis=0)).sum(), params, batch["g"])
    return sum(jax.tree.leaves(sums)), {"tokens": batch["n"].sum()}


def gradients(steps, seed=0):
    """Gradients by step and region, and batches that have them."""
    rng = np.random.default_rng(seed)
    shapes = {name: (steps, R, 1, *x.shape) for name, x in START.items()}
    g = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    n = rng.integers(1, 30, (steps, R, 1)).astype(np.float32)
    return [{"g": {k: x[t] for k, x in g.items()}, "n": n[t]} for t in range(steps)]


def trained(one, batches, participants=None):
    state = one.init(START)
    for batch in batches:
        state, _ = one.step(state, batch, participants)
    return state


def finite(tree):
    return all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(tree))


def residuals(state):
    return [np.asarray(x) for x in jax.tree.leaves(state.codec) if x.dtype == jnp.float32]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("bad", ["nan", "outlier"])
def test_the_residual_of_who_is_left_out_stays_as_it_was(bad, skip):
    """Its payload was encoded all the same; with the new residual what it lost would be lost."""
    codec = lc.compression.make("int8", error_feedback=1.0)
    settings = {"outlier_factor": 3.0, "skip_nonfinite": skip}
    one = engine(linear_loss, lc.methods.diloco(2, codec=codec), **settings)
    batches = gradients(8)
    for leaf in batches[1]["g"].values():
        leaf[BAD] *= np.nan if bad == "nan" else 1e4
    state = trained(one, batches[:2])
    others = [r for r in range(R) if r != BAD]
    left_out = bad == "outlier" or not skip
    for residual in residuals(state):
        assert np.abs(residual[others]).max() > 0
        assert np.isfinite(residual).all()
        assert not left_out or not residual[BAD].any()
    for batch in batches[2:]:
        state, _ = one.step(state, batch)
    assert finite((state.anchor, state.inner.params, state.codec))


def test_tokens_are_counted_for_every_fragment_by_itself():
    """Weights of a fragment are the tokens since its own last send."""
    rule, pattern, period, steps = optax.sgd(1.0), ["^a", "^b"], 4, 12
    method = lc.methods.streaming_diloco(period, 2, 0, 0.0, pattern=pattern, outer=rule)
    one = engine(linear_loss, method, weights="tokens")
    batches = gradients(steps)
    state = trained(one, batches)

    anchor = {name: x.copy() for name, x in START.items()}
    own = {name: np.stack([x] * R) for name, x in START.items()}
    tokens = {name: np.zeros(R) for name in START}
    first = {"a": 2, "b": 4}  # floor((p + 1) H / K)
    for t, batch in enumerate(batches, 1):
        for name in START:
            own[name] = own[name] - LR * batch["g"][name][:, 0]
            tokens[name] += batch["n"][:, 0]
            if t >= first[name] and (t - first[name]) % period == 0:
                share = tokens[name] / tokens[name].sum()
                anchor[name] = (share[:, None] * own[name]).sum(axis=0)
                own[name], tokens[name] = np.stack([anchor[name]] * R), np.zeros(R)
    for name in START:
        np.testing.assert_allclose(state.anchor[name][0], anchor[name], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state.inner.params[name], own[name], rtol=1e-5, atol=1e-6)
    counted = np.asarray(state.inner.tokens)
    np.testing.assert_allclose(counted, np.stack([tokens["a"], tokens["b"]], axis=1))


def test_what_went_wrong_in_flight_is_not_replayed():
    """Between the send after step 2 and the landing after step 4 a region's values turn NaN."""
    method = lc.methods.streaming_diloco(4, 2, 2, 0.3, pattern=["^a", "^b"])
    one = engine(linear_loss, method, skip_nonfinite=False)
    batches = gradients(8)
    for leaf in batches[2]["g"].values():
        leaf[BAD] *= np.nan
    state = trained(one, batches[:3])
    assert not finite(state.inner.params["a"][BAD])
    state, _ = one.step(state, batches[3])
    landed, anchor = np.asarray(state.inner.params["a"]), np.asarray(state.anchor["a"])
    np.testing.assert_array_equal(landed[BAD], anchor[0])
    assert (landed[0] != anchor[0]).any(), "the others keep a part of what they learnt"
    for batch in batches[4:]:
        state, _ = one.step(state, batch)
    assert finite((state.anchor, state.inner.params))
