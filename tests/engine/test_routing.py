"""Paths of microbatches through stages and regions: values, gradients and labels on their way."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import lowcomm_jax as lc
from lowcomm_jax import stages
from lowcomm_jax.regions import Regions
from lowcomm_jax.routing import Paths

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


def one_stage(paths, w, x_MxD, target_MxD, shift_T):
    hand_on = functools.partial(paths.hand_on, shift_T=shift_T)
    out_MxD = stages.gpipe(lambda x: jnp.sin(x * w[0]), x_MxD, paths.stages, hand_on)
    last = stages.index() == paths.stages - 1
    labels = paths.labels(target_MxD, target_MxD * 0.5, shift_T)
    return stages.total(jnp.where(last, out_MxD, 0.0)), *labels


def walked(w_RxS, x_RxMxD, paths, shift_T):
    """Every microbatch followed on its own; (what arrives where, from which region)."""
    out, source = jnp.zeros(x_RxMxD.shape), np.zeros(x_RxMxD.shape[:2], int)
    for start in range(paths.regions):
        for m in range(paths.microbatches):
            here, x = start, x_RxMxD[start, m]
            for s in range(paths.stages):
                x = jnp.sin(x * w_RxS[here, s])
                if s < paths.stages - 1:
                    here = (here + int(shift_T[m + s])) % paths.regions
            out, source[here, m] = out.at[here, m].set(x), start
    return out, source


# More microbatches than stages, and fewer: the first and last ticks hand on from some stages alone.
@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 4, 2)])
def test_values_gradients_and_labels_follow_the_path(shape):
    paths = Paths(*shape)
    regions, count, microbatches = shape
    rng = np.random.default_rng(1)
    w = rng.uniform(0.5, 1.5, (regions, count)).astype(np.float32)
    x, c = rng.standard_normal((2, regions, microbatches, 3)).astype(np.float32)
    target = rng.integers(1, 9, x.shape).astype(np.int32)
    shift_T = rng.integers(0, regions, paths.ticks).astype(np.int32)
    assert 0 < shift_T[:-1].sum() < paths.ticks - 1

    mesh = lc.make_mesh(regions, count)
    stage = functools.partial(one_stage, paths)
    run = stages.over_stages(stage, mesh, (P("stage"), P(), P(), P()), P())

    def one(w, x, target, c):
        def loss(w, x):
            out, labels, weights = run(w, x, target, shift_T)
            return jnp.sum(out * c), (out, labels, weights)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(w, x)

    (_, found), grads = jax.jit(Regions(regions, mesh).lift(one, (0, 0, 0, 0)))(w, x, target, c)

    def reference(w, x):
        out, source = walked(w, x, paths, shift_T)
        return jnp.sum(out * c), (out, source)

    expected_grads, (expected, source) = jax.grad(reference, (0, 1), has_aux=True)(w, x)
    np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-6)
    for got, want in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    came = np.stack(
        [[target[source[r, m], m] for m in range(microbatches)] for r in range(regions)]
    )
    np.testing.assert_array_equal(found[1], came)
    np.testing.assert_array_equal(found[2], came * 0.5)
