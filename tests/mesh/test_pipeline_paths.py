"""Paths of microbatches through stages and regions: values, gradients and labels on their way."""

import functools
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import lowcomm_jax as lc
from lowcomm_jax.mesh import pipeline_paths, stages
from lowcomm_jax.mesh.pipeline_paths import Paths
from lowcomm_jax.mesh.regions import Regions

ROOT = Path(__file__).parents[2]
eight = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


def one_stage(paths, w, x_MxD, target_MxD, row_T):
    def apply(held):
        x, labels = held
        return jnp.sin(x * w[0]), labels

    held = x_MxD, pipeline_paths.label(target_MxD, target_MxD * 0.5)
    hand_on = functools.partial(paths.hand_on, row_T=row_T)
    out_MxD, came = stages.gpipe(apply, held, paths.stages, hand_on)
    last = stages.index() == paths.stages - 1
    labels = pipeline_paths.read_labels(came, paths.stages)
    return stages.total(jnp.where(last, out_MxD, 0.0)), *labels


def walked(w_RxS, x_RxMxD, c_RxMxD, ways_TxBxR):
    """Every microbatch followed on its own, there and back.

    Returns:
      (what arrives where, from which region, gradients of sum(c * what arrives) by w and x).
    """
    (regions, count), microbatches = w_RxS.shape, x_RxMxD.shape[1]
    out, source = np.zeros(x_RxMxD.shape), np.zeros((regions, microbatches), int)
    grad_w, grad_x = np.zeros(w_RxS.shape), np.zeros(x_RxMxD.shape)
    for start, m in itertools.product(range(regions), range(microbatches)):
        here, x, been = start, x_RxMxD[start, m].astype(float), []
        for s in range(count):
            been.append((here, x))
            x = np.sin(x * w_RxS[here, s])
            if s < count - 1:
                here = ways_TxBxR[m + s, s, here]
        out[here, m], source[here, m] = x, start
        gradient = c_RxMxD[here, m].astype(float)
        for s, (region, x) in reversed(list(enumerate(been))):
            inner = gradient * np.cos(x * w_RxS[region, s])
            grad_w[region, s] += (inner * x).sum()
            gradient = inner * w_RxS[region, s]
        grad_x[start, m] = gradient
    return out, source, grad_w, grad_x


def assert_followed(paths):
    """A pipeline on these paths gives what `walked` does."""
    regions, count, microbatches = shape = paths.regions, paths.stages, paths.microbatches
    rng = np.random.default_rng(1)
    w = rng.uniform(0.5, 1.5, (regions, count)).astype(np.float32)
    x, c = rng.standard_normal((2, regions, microbatches, 3)).astype(np.float32)
    target = rng.integers(1, 9, x.shape).astype(np.int32)
    row_T = rng.integers(0, len(paths.table), paths.ticks).astype(np.int32)
    ways = paths.table[row_T]
    assert (ways != np.arange(regions)).any() and (np.diff(ways, axis=0) != 0).any(), shape

    mesh = lc.make_mesh(regions, count)
    stage = functools.partial(one_stage, paths)
    run = stages.over_stages(stage, mesh, (P("stage"), P(), P(), P()), P())

    def one(w, x, target, c):
        def loss(w, x):
            out, labels, weights = run(w, x, target, row_T)
            return jnp.sum(out * c), (out, labels, weights)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(w, x)

    (_, found), grads = jax.jit(Regions(regions, mesh).lift(one, (0, 0, 0, 0)))(w, x, target, c)
    expected, source, *expected_grads = walked(w, x, c, ways)
    np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-6)
    for got, want in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    came = np.stack(
        [[target[source[r, m], m] for m in range(microbatches)] for r in range(regions)]
    )
    np.testing.assert_array_equal(found[1], came)
    np.testing.assert_array_equal(found[2], came * 0.5)


# More microbatches than stages, and fewer: the first and last ticks hand on from some stages alone.
@eight
@pytest.mark.parametrize("shape", [(2, 2, 3), (2, 3, 5), (2, 4, 2), (4, 2, 3)])
def test_values_gradients_and_labels_follow_the_path(shape):
    assert_followed(Paths(*shape, seed=3))


def test_four_regions_of_three_stages():
    """Twelve devices: a process of its own."""
    flags = "--xla_force_host_platform_device_count=12"
    env = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, __file__, "4", "3", "4"], env=env, check=True)


SIZES = [(1, 1), (2, 1), (2, 2), (2, 6), (3, 2), (4, 1), (4, 3), (5, 1), (8, 2), (16, 3)]


@pytest.mark.parametrize(("regions", "boundaries"), SIZES)
def test_every_two_replicas_are_equally_likely_to_meet(regions, boundaries):
    found = pipeline_paths.table(regions, boundaries, 7)
    everyone = np.arange(regions)
    np.testing.assert_array_equal(np.sort(found, axis=2), np.broadcast_to(everyone, found.shape))
    for way_PxR in np.moveaxis(found, 1, 0):
        met = (way_PxR[:, :, None] == everyone).sum(0)
        np.testing.assert_array_equal(met, len(found) / regions)
        if regions <= 4:  # any permutation, equally likely
            counts = np.unique(way_PxR, axis=0, return_counts=True)[1]
            assert set(counts) == {len(found) / math.factorial(regions)}
    assert len(found) <= (24 if regions <= 12 else 2 * regions)
    paths = Paths(regions, boundaries + 1, 20)
    transfers, _ = pipeline_paths._transfers(paths)
    assert len(transfers) <= 1 + (2 * boundaries - 1) * len(paths.table)


def test_ways_are_not_cyclic_shifts_alone_and_differ_between_boundaries():
    for regions in (3, 4, 5, 8, 16):
        found = pipeline_paths.table(regions, 2, 0)
        shift = (found - np.arange(regions)) % regions
        assert (shift != shift[..., :1]).any(axis=2).mean() > 0.3
        assert (found[:, 0] != found[:, 1]).any(axis=1).mean() > 0.7
    # Where they fit, all combinations.
    assert len(np.unique(pipeline_paths.table(2, 4, 0).reshape(-1, 8), axis=0)) == 2**4


def test_the_seed_alone_decides():
    first = pipeline_paths.table(8, 2, 0).copy()
    pipeline_paths.table.cache_clear()
    np.testing.assert_array_equal(pipeline_paths.table(8, 2, 0), first)
    assert (pipeline_paths.table(8, 2, 1) != first).any()
    # The raw stream of the generator does not change between versions, so neither do these.
    assert first[0].tolist() == [[0, 1, 3, 5, 2, 4, 7, 6], [1, 4, 5, 2, 7, 6, 0, 3]]


def test_both_steps_of_a_path_are_drawn_independently():
    regions, paths = 4, Paths(4, 3, 6000)
    row_T = np.asarray(paths.draw(jax.random.key_data(jax.random.key(1))))
    m = np.arange(paths.microbatches)
    for start in range(regions):
        middle = paths.table[row_T[m], 0, start]
        end = paths.table[row_T[m + 1], 1, middle]
        counts = np.bincount(middle * regions + end, minlength=regions**2)
        assert (abs(counts - 375) < 5 * math.sqrt(375)).all()


@eight
def test_all_regions_take_the_draw_of_the_first():
    mesh, paths = lc.make_mesh(4), Paths(4, 2, 50)
    keys = jax.random.key_data(jax.random.split(jax.random.key(0), 4))
    row_RxT = np.asarray(jax.jit(Regions(4, mesh).lift(paths.agreed, (0,)))(keys))
    np.testing.assert_array_equal(row_RxT, row_RxT[:1].repeat(4, 0))
    np.testing.assert_array_equal(row_RxT[0], paths.draw(keys[0]))
    assert (row_RxT[0] != np.asarray(paths.draw(keys[1]))).any()


if __name__ == "__main__":
    assert_followed(Paths(*map(int, sys.argv[1:])))


def test_gradients_go_back_the_way_that_values_came():
    """A cycle of three regions is another way backward: region 0 hears from 1, to whom it sent."""
    cycle = next(i for i, way in enumerate(Paths(3, 2, 1).table[:, 0]) if way.tolist() == [1, 2, 0])
    hops = Paths(3, 2, 1).hops(np.array([cycle, 0]), 100, 3)
    assert hops == [(((1, 2, 0),), 103), (((2, 0, 1),), 100)]
