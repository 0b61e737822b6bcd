"""Operations with a backward pass of their own against plain formulas, differentiated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm_jax.models import loss, operations
from lowcomm_jax.models.attention import rope_tables

KEYS = jax.random.split(jax.random.key(3), 8)
X = jax.random.normal(KEYS[0], (3, 5, 8))
SCALE = 1.0 + 0.3 * jax.random.normal(KEYS[1], (8,))
EPS = 1e-3


def plain_norm(x, scale):
    root = jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + EPS)
    return x / root * jnp.expand_dims(scale, tuple(range(x.ndim - 1)))


def plain_rotation(x, tables):
    cos, sin = (table[None] for table in tables)
    first, second = x[..., :4], x[..., 4:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def values_and_gradients(fn, *args):
    """Value, and the gradient of a fixed mixture of the outputs."""
    out, pull = jax.vjp(jax.jit(fn), *args)
    leaves, tree = jax.tree.flatten(out)
    mix = [jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape) for y in leaves]
    return out, pull(jax.tree.unflatten(tree, mix))


TABLES = rope_tables(jnp.arange(5), 8, 50.0)
KERNELS = tuple(jax.random.normal(key, (8, 6)) for key in KEYS[2:5])
TABLE = jax.random.normal(KEYS[5], (11, 8))
ROWS = jnp.array([3, 0, 10, 3, 3, 7])
PAIRS = {
    "rms_norm": (lambda x, s: operations.rms_norm(x, s, EPS), plain_norm, (X, SCALE)),
    "rotated_norm": (
        lambda x, s: operations.rotated_norm(x, s, TABLES, EPS),
        lambda x, s: plain_rotation(plain_norm(x, s), TABLES),
        (X, SCALE),
    ),
    "gelu": (operations.gelu, jax.nn.gelu, (3 * X,)),
    "gated": (operations.gated, lambda a, b: jax.nn.silu(a) * b, (X[0], X[1])),
    "products": (
        operations.products,
        lambda x, kernels: tuple(x @ kernel for kernel in kernels),
        (X[0], KERNELS),
    ),
    "table_scores": (
        lambda x, t: operations.table_scores(x, t, "vd"),
        lambda x, t: x @ t.T,
        (X[0], TABLE),
    ),
    "look_up": (
        lambda t: operations.look_up(t, ROWS, "fill", jnp.float32),
        lambda t: t[ROWS],
        (TABLE,),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_values_and_gradients_are_those_of_the_plain_formula(name):
    written, plain, args = PAIRS[name]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        values_and_gradients(written, *args),
        values_and_gradients(plain, *args),
    )


@pytest.mark.parametrize("name", PAIRS)
def test_gradients_have_the_dtypes_of_their_leaves(name):
    """Weights below float32 train too."""
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PAIRS[name][2])
    _, gradients = values_and_gradients(PAIRS[name][0], *narrow)
    assert {x.dtype for x in jax.tree.leaves(gradients)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("reduction", [loss.in_passes, loss.in_one_pass, loss._reduced])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_reduce_as_log_sum_exp_on_every_platform(reduction, dtype):
    """Also the form that GPUs alone take; a column of another device's part counts 0."""
    logits = (30 * jax.random.normal(KEYS[6], (6, 11))).astype(dtype)
    logits = logits.at[1].set(-1e30).at[2, 4].set(80.0)
    column = jnp.array([0, 10, 4, 5, -3, 11])
    top, sums, chosen = jax.jit(reduction)(logits, column)
    wide = np.asarray(logits, np.float64)
    np.testing.assert_array_equal(top, wide.max(-1))
    np.testing.assert_allclose(sums, np.exp(wide - wide.max(-1, keepdims=True)).sum(-1), rtol=1e-5)
    own = [wide[n, c] if 0 <= c < 11 else 0.0 for n, c in enumerate(np.asarray(column))]
    np.testing.assert_array_equal(chosen, own)


def test_the_gradient_of_the_loss_is_the_distance_from_the_target():
    logits = 3 * jax.random.normal(KEYS[7], (6, 11))
    target, weight = jnp.array([0, 10, 4, 5, 1, 7]), jnp.array([0.1, 0.2, 0.0, 0.3, 0.4, 0.5])
    z_loss = 0.07

    def total(x):
        return loss.weighted_loss(loss.scores(x, target), weight, z_loss)[0]

    gradient = np.asarray(jax.jit(jax.grad(total))(logits), np.float64)
    wide, w = np.asarray(logits, np.float64), np.asarray(weight, np.float64)[:, None]
    partition = np.log(np.exp(wide).sum(-1, keepdims=True))
    shares = np.exp(wide - partition)
    expected = w * (shares * (1 + 2 * z_loss * partition) - np.eye(11)[np.asarray(target)])
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)
