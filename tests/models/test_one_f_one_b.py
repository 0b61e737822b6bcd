"""1F1B on a toy: loss and gradients of microbatches that go through the stages one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import lowcomm_jax as lc
from lowcomm_jax.mesh import stages
from lowcomm_jax.models.pipeline.one_f_one_b import OneFOneB

WIDTH, PER_STAGE = 3, 2  # PER_STAGE: tokens of the vocabulary a stage holds
pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


def one_stage(count, params, token_MxN):
    first = stages.index() * PER_STAGE

    def enter(p, m):
        row_N = token_MxN[m] - first
        here_N = (row_N >= 0) & (row_N < PER_STAGE)
        rows = jnp.take(p["table"], row_N, axis=0, mode="clip")
        return stages.total(jnp.where(here_N[:, None], rows, 0.0))

    def apply(p, x):
        return x + jnp.tanh(x @ p["w"][0])

    def leave(p, y, m):
        y = p["gain"][None] * stages.total(jnp.where(stages.index() == count - 1, y, 0.0))
        score = jnp.sin(y @ p["table"].T)  # tied
        is_next = token_MxN[m][:, None] == first + jnp.arange(PER_STAGE)[None]
        loss = stages.total(jnp.sum(jnp.where(is_next, 3.0, 1.0) * score))
        return loss, {"square": stages.total(jnp.sum(score**2))}

    sums, grads = OneFOneB(enter, apply, leave, count, len(token_MxN))(params)
    return sums, {**grads, "gain": stages.total(grads["gain"])}


def one_by_one(params, token_MxN):
    loss, square = 0.0, 0.0
    for token_N in token_MxN:
        x = params["table"][token_N]
        for w in params["w"]:
            x = x + jnp.tanh(x @ w)
        score = jnp.sin(params["gain"][None] * x @ params["table"].T)
        is_next = token_N[:, None] == jnp.arange(len(params["table"]))[None]
        loss += jnp.sum(jnp.where(is_next, 3.0, 1.0) * score)
        square += jnp.sum(score**2)
    return loss, {"square": square}


# More microbatches than are kept, as many, fewer than stages; one stage.
@pytest.mark.parametrize(("count", "microbatches"), [(4, 9), (2, 3), (4, 2), (1, 3)])
def test_loss_and_gradients_of_every_microbatch(count, microbatches):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    params = {
        "w": draw(count, WIDTH, WIDTH),
        "table": draw(count * PER_STAGE, WIDTH),
        "gain": draw(WIDTH),
    }
    token_MxN = rng.integers(0, count * PER_STAGE, (microbatches, 4)).astype(np.int32)
    cut = {"w": P("stage"), "table": P("stage"), "gain": P()}
    run = stages.over_stages(
        functools.partial(one_stage, count), lc.make_mesh(1, count), (cut, P()), (P(), cut)
    )
    sums, grads = jax.jit(run)(params, token_MxN)
    found = jax.jit(jax.value_and_grad(one_by_one, has_aux=True))(params, token_MxN)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)  # noqa: E731
    jax.tree.map(close, (sums, grads), found)
